"""Write a Hugging Face folder: lm-lab export run_dir=RUN output_dir=DIR"""

from lm.cli.imports import heavy_imports
from lm.cli.launch import launch
from lm.config import ExportConfig
from lm.exchange.find_model import model_folder


def task(config: ExportConfig) -> None:
    model_folder(config.run_dir)  # raises BadInput before the slow imports below
    with heavy_imports():
        from lm.exchange.huggingface import export
        from lm.exchange.portable import load_model

    net, tokenizer = load_model(config.run_dir, config.trust)
    architecture = export(net, tokenizer, config.output_dir)
    print(f"{config.output_dir}: {architecture}; AutoModelForCausalLM.from_pretrained loads it")
    if net.documents.separator is not None:
        print("transformers does not mask attention between documents: give it one document in a row of a batch")


def main(line: list[str] | None = None) -> None:
    launch(task, ExportConfig, "export", line)
