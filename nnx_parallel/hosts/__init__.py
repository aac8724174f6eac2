"""Bring-up and launch of many processes, batches on devices, arrays on hosts, signals to stop."""
