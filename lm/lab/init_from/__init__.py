"""A run that starts from a finished model: the settings that it takes from the model, and the weights."""
