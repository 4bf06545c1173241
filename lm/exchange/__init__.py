"""A trained model as files: the project's own folder, one that Hugging Face transformers loads, and GGUF for llama.cpp.

In: a Transformer and a Tokenizer, or a run directory. Out: safetensors and JSON files, or the model loaded from them.
Imports lm.data, lm.model and the packages below them; torch and safetensors, not
transformers; gguf only where a GGUF file is written.
"""
