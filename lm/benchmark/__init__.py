"""How fast it is: every figure beside a peer that takes turns with it, or beside a limit of the machine."""
