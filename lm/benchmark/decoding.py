"""Greedy decoding, batch 1 and larger, beside transformers.generate on the same weights and beside the memory."""

from collections.abc import Iterator
from itertools import islice

import torch

from lm.benchmark.limits import bandwidth
from lm.benchmark.measure import Figure, alternate, paired
from lm.benchmark.peers import in_transformers
from lm.config import HeadConfig, ModelConfig
from lm.decode import decode
from lm.model.transformer import Transformer

SMALL = (ModelConfig(), 2048, 128, 96)  # body, vocabulary, context, tokens to write
GPT2 = ModelConfig(n_layers=12, d_model=768, n_heads=12, d_ff=3072, ffn="gelu", norm="layernorm", position="learned")
LARGE = (GPT2, 50257, 1024, 24)


def decoding(device: str, seconds: float) -> Iterator[Figure]:
    for name, (config, vocab_size, seq_len, count) in (("default", SMALL), ("GPT-2 124M", LARGE)):
        net = Transformer(config, HeadConfig(), vocab_size=vocab_size, seq_len=seq_len).to(device).eval()
        theirs = in_transformers(net)
        prompt = torch.randint(vocab_size, (1, 8), device=device)
        calls = {"ours": lambda net=net, prompt=prompt, count=count: list(islice(decode(net, prompt.tolist()), count))}
        if theirs is not None:
            calls["transformers"] = lambda theirs=theirs, prompt=prompt, count=count: theirs.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                min_new_tokens=count,
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        with torch.inference_mode():
            times = alternate(calls, seconds, at_least=3)
        ours, _ = paired(times, "ours", "ours")
        if theirs is not None:
            ours, other = paired(times, "ours", "transformers")
            yield Figure("decoding", f"{name}, batch 1", count / ours, "tokens/s", "transformers", count / other)
        if name != "default":
            read = sum(parameter.nbytes for parameter in net.parameters())
            bound = bandwidth(device) / read
            yield Figure("decoding", f"{name}, batch 1", count / ours, "tokens/s", "memory bandwidth", bound)
