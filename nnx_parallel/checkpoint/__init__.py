"""Saving and restoring: any layout into any other, verified, and safe against crashes."""
