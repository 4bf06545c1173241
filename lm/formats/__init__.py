"""A model as files: the project's own folder, one of transformers in and out, GGUF, a page, adapters for PEFT.

In: a Transformer and a Tokenizer, or a folder. Out: safetensors and JSON files, or the model that they hold.
Imports lm.data, lm.model, lm.lab.report and the packages below them, torch and safetensors; transformers only to read one
of its folders, gguf only to write such a file.
"""
