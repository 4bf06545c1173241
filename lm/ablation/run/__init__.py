"""The tuning that decides which runs to make next, and what in a plan weakens its answer."""
