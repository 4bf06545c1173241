"""Write a Hugging Face folder, a GGUF file or a page: lm-lab export run_dir=RUN output_dir=DIR"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lm.cli.arguments import parse, split_words, with_folders
from lm.errors import UserError, expand_paths, require, require_choice
from lm.folder import model_folder, read_result, runs_of
from lm.training.run_directory import RunDirectory

# Types of the matrices in each format, the default first.
EXPORT_DTYPES = {"safetensors": ("f32",), "gguf": ("f32", "f16", "q8_0"), "page": ("f16", "f32")}


@dataclass(slots=True, kw_only=True)
class ExportConfig:
    run_dir: str | None = None  # run, or its model folder; null: newest run
    output_dir: str  # new or empty folder
    format: str = "safetensors"  # safetensors: Hugging Face folder; gguf: for llama.cpp; page: HTML
    dtype: str | None = None  # type of the matrices: f32; in a page f16 (null) or f32; in gguf f32, f16, q8_0
    title: str | None = None  # title of a page; null: name of the run
    classes: list[str] | None = None  # dotted paths of classes of your own that a model may use

    def __post_init__(self) -> None:
        expand_paths(self, "run_dir", "output_dir")
        require_choice("format", self.format, EXPORT_DTYPES)
        self.dtype = EXPORT_DTYPES[self.format][0] if self.dtype is None else self.dtype
        require_choice("dtype", self.dtype, EXPORT_DTYPES[self.format])
        require(self.title is None or self.format == "page", f"title={self.title}", "format=page, which shows it")


SCHEMA = ExportConfig


def run(args: list[str]) -> None:
    words, others = split_words(args, ExportConfig)
    config = parse(ExportConfig, with_folders(words, others))
    run_dir, *further = runs_of(config.run_dir)
    if further:
        raise UserError(f"run_dir={config.run_dir}: names {1 + len(further)} runs, expected one")
    settings, result = _training_of(run_dir)  # raises UserError before the slow imports below
    from lm.folder import load_model
    from lm.lab.formats.card import write_card
    from lm.lab.formats.gguf import FILE, export_gguf
    from lm.lab.formats.huggingface import export
    from lm.lab.formats.output import check_weights
    from lm.lab.formats.page import export_page

    assert config.dtype is not None
    net, tokenizer = load_model(run_dir, config.classes or ())
    check_weights(net)
    prompt = tokenizer.without_unknown(next((sample["prompt"] for sample in result.get("samples", [])), ""))
    if config.format == "page":
        place = Path(run_dir).resolve()
        run = place.parent if place.name == "model" else place
        page = export_page(net, tokenizer, config.output_dir, config.dtype, config.title or run.name, prompt)
        print(f"{page}: {page.stat().st_size:,} bytes; a browser opens it, without a network")
        return
    if config.format == "gguf":
        architecture = export_gguf(net, tokenizer, config.output_dir, config.dtype)
        written, reader, program = Path(config.output_dir) / FILE, "llama.cpp", "llama.cpp"
    else:
        card = partial(write_card, net=net, settings=settings, result=result, prompt=prompt)
        architecture = export(net, tokenizer, config.output_dir, card)
        written, reader, program = Path(config.output_dir), "AutoModelForCausalLM.from_pretrained", "transformers"
    print(f"{written}: {architecture}; {reader} loads it")
    if net.document_separator is not None:
        print(f"{program} does not mask attention between documents: give it one document in a row of a batch")


def _training_of(run_dir: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.yaml and result.json of the run whose model is exported, each empty if there is no such file."""
    folder = model_folder(run_dir)
    directory = RunDirectory(folder.parent)
    if folder.name != "model" or not directory.config.exists():
        return {}, {}
    return directory.read_config(), read_result(directory.result) or {}
