"""How fast it is: every figure beside a peer or a limit, measured in the same process by taking turns."""
