"""The command lines that use runs: generate, evaluate, export, runs, look."""

from dataclasses import asdict, dataclass, field

from lm.config.checks import UserError, expand_paths, require, require_choice, require_min, require_seed
from lm.config.data import DataConfig

OF_A_TEXT = {"source", "path", "sha256", "name", "revision", "split", "separator", "column", "rows", "max_bytes"}
OF_A_TEXT |= {"cache_dir", "verify"}  # settings of data that say which text is read
FOR_A_TEXT = ("document_mask", "seq_len", "val_split", "val_path")  # settings of data that have an equivalent for it
EXPORT_DTYPES = {"safetensors": ("f32",), "gguf": ("f32", "f16", "q8_0"), "page": ("f16", "f32")}  # the default first


def _require_figure(plot: str | None) -> None:
    require(plot is None or plot.endswith((".svg", ".png")), f"plot={plot}", "a name that ends in .svg or .png")


@dataclass(slots=True, kw_only=True)
class GenerateConfig:
    run_dir: str | None = None  # a run, or a folder of transformers; also [RUN1,RUN2] or a glob; null: the newest run
    prompt: str | None = None  # verbatim, whatever it contains
    prompt_file: str | None = None  # a file to read the prompt from; - is standard input
    interactive: bool = False  # ask for prompts until end of input, each drawn with a further seed
    max_new_tokens: int = 128  # a continuation ends earlier at an end-of-text token
    temperature: float = 0.0  # 0: greedy
    top_k: int | None = None  # sample among the k most probable tokens only
    top_p: float = 1.0  # sample among the most probable tokens that together have this probability only
    min_p: float = 0.0  # sample among the tokens that are at least this many times as probable as the most probable
    top: int | None = None  # also show so many of the likeliest next tokens of each step, on standard error
    n_samples: int = 1  # above 1: each is preceded by a line with its number
    seed: int = 0  # of sampling
    threads: int | None = None  # null: OMP_NUM_THREADS, else the number of cores
    classes: list[str] = field(default_factory=list)  # your own classes that the model may import: [MODULE.CLASS]

    def __post_init__(self) -> None:
        expand_paths("", self, "run_dir", "prompt_file")
        require_min(0, "", self, "max_new_tokens", "temperature")
        require_seed(self.seed)
        require_min(1, "", self, "threads", "n_samples", "top")
        if self.n_samples > 1 and self.temperature == 0:
            raise UserError(f"n_samples={self.n_samples}: greedy decoding has one answer; add temperature=1")


@dataclass(slots=True, kw_only=True)
class EvaluateConfig:
    run_dir: str | None = None  # also [RUN1,RUN2] or a glob: several runs; null: the newest
    data: DataConfig | None = None  # the group data chooses it; without it, the validation split of the run
    texts: str | None = None  # in place of data: the paths of several texts, [FILE1,FILE2] or a glob
    seq_len: int | None = None  # tokens of a window, which takes memory; null: the model's context
    document_mask: bool | None = None  # whether attention is kept within documents; null: as in training
    details: bool = False  # also the loss by the frequency of the target
    plot: str | None = None  # a file, .svg or .png, that gets a figure of the details
    threads: int | None = None  # null: OMP_NUM_THREADS, else the number of cores
    classes: list[str] = field(default_factory=list)  # your own classes that the model may import: [MODULE.CLASS]

    def __post_init__(self) -> None:
        expand_paths("", self, "run_dir", "texts", "plot")
        if self.data is not None:
            for key in sorted(asdict(self.data).keys() - OF_A_TEXT):
                value = getattr(self.data, key)
                advice = f"; give {key.replace('val_', 'data.')}={value}" if key in FOR_A_TEXT else ""
                if value != DataConfig.__dataclass_fields__[key].default:
                    raise UserError(f"data.{key}={value}: is for training{advice}")
            require(self.texts is None, f"texts={self.texts}", "data or texts, not both")
        require_min(1, "", self, "threads", "seq_len")
        self.details |= self.plot is not None
        _require_figure(self.plot)


@dataclass(slots=True, kw_only=True)
class ExportConfig:
    run_dir: str | None = None  # a run, or its model folder; null: the newest run
    output_dir: str  # a new or an empty folder
    format: str = "safetensors"  # a Hugging Face folder; gguf: a file for llama.cpp; page: an HTML file that generates
    dtype: str | None = None  # of the matrices: f32, f16 or, in gguf, q8_0; null: f16 in a page, else f32
    title: str | None = None  # of a page; null: the name of the run
    classes: list[str] = field(default_factory=list)  # your own classes that the model may import: [MODULE.CLASS]

    def __post_init__(self) -> None:
        expand_paths("", self, "run_dir", "output_dir")
        require_choice("format", self.format, tuple(EXPORT_DTYPES))
        self.dtype = EXPORT_DTYPES[self.format][0] if self.dtype is None else self.dtype
        require_choice("dtype", self.dtype, EXPORT_DTYPES[self.format])
        require(self.title is None or self.format == "page", f"title={self.title}", "format=page, which shows it")


@dataclass(slots=True, kw_only=True)
class RunsConfig:
    folder: str = "runs"  # holds runs at any depth
    where: str | None = None  # a query of pandas, names with _ for a dot: 'head_name == "tied" and val_loss < 3.1'
    sort: str = "val_bpb"  # a setting or a result; -KEY: descending
    plot: str | None = None  # an .svg or .png file for the curves of all listed runs
    csv: str | None = None  # a file for the list as CSV; - is standard output

    def __post_init__(self) -> None:
        expand_paths("", self, "folder", "plot", "csv")
        _require_figure(self.plot)


@dataclass(slots=True, kw_only=True)
class LookConfig:
    run_dir: str | None = None  # the runs to look at; also [RUN1,RUN2] or a glob; null: those below the folder
    folder: str = "runs"  # holds runs at any depth; it may still be empty
    port: int = 0  # of the page's address on this machine; 0: one that is free
    open: bool = True  # the page in the browser, if there is one
    threads: int | None = None  # null: OMP_NUM_THREADS, else the number of cores
    classes: list[str] = field(default_factory=list)  # your own classes that the model may import: [MODULE.CLASS]

    def __post_init__(self) -> None:
        expand_paths("", self, "run_dir", "folder")
        require(self.port == 0 or 1024 <= self.port < 2**16, f"port={self.port}", "0, or 1024 to 65535")
        require_min(1, "", self, "threads")
