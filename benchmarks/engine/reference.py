"""Log-probabilities of tokens by transformers in fp32.

    python -m benchmarks.engine.reference KIND SIZE DEVICE IN OUT

IN has {name: [tokens, first]}; OUT gets {name: log-probabilities of the tokens from `first` on}.
"""

import json
import sys

import torch

from . import models


@torch.no_grad()
def logprobs(model: torch.nn.Module, tokens: list[int], first: int, device: str) -> list[float]:
    ids = torch.tensor([tokens], device=device)
    out = model(ids, use_cache=False, logits_to_keep=len(tokens) - first + 1)
    logits = out.logits[0, :-1].float()
    want = ids[0, first:, None]
    done: list[float] = logits.log_softmax(-1).gather(-1, want)[:, 0].tolist()
    return done


def main() -> None:
    kind, size, device, source, out = sys.argv[1:]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = models.model_of(kind, size, torch.float32, device)
    with open(source) as file:
        given = json.load(file)
    done = {name: logprobs(model, tokens, first, device) for name, (tokens, first) in given.items()}
    with open(out, "w") as file:
        json.dump(done, file)


if __name__ == "__main__":
    main()
