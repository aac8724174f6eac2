"""What a step will need and send, read from the plan and from the real compilers."""
