"""Proofs of what a step computes: its gradients against its derivatives, and one layout against another."""
