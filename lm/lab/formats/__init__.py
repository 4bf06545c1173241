"""A model as files of other programs: Hugging Face out and in, GGUF, a page, adapters for PEFT."""
