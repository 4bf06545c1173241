"""A trained model as files: the project's own folder, and one that Hugging Face transformers loads.

In: a Transformer and a Tokenizer, or a run directory. Out: safetensors and JSON files, or the model loaded from them.
Imports lm.data, lm.model and the packages below them; torch and safetensors, not transformers.
"""
