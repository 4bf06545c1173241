"""The pages of docs/ that programs write: settings, transcripts, and the outputs of notebooks."""
