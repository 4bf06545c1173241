"""The content of a model folder's config.json."""

from dataclasses import dataclass

from lm.config import HeadConfig, ModelConfig, require_min

WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"


@dataclass(slots=True, kw_only=True)
class ModelSettings:
    """All that builds a model, and the hashes of the files beside it."""

    vocab_size: int
    seq_len: int  # the longest context
    document_separator: int | None = None
    model: ModelConfig
    head: HeadConfig
    sha256: dict[str, str]  # of WEIGHTS and TOKENIZER; empty for a folder of transformers, which says none
    architecture: str | None = None  # in transformers, of one of its folders

    def __post_init__(self) -> None:
        require_min(1, "", self, "vocab_size", "seq_len")
        require_min(0, "", self, "document_separator")
