"""Makes ``tests/golden_models`` with transformers, and checks folders that burst_jax has saved.

No test imports this: it needs torch and transformers, in an environment of their own::

    python3 -m venv /tmp/peer
    /tmp/peer/bin/pip install torch transformers safetensors numpy    # torch for the CPU is enough
    /tmp/peer/bin/python tests/support/make_hf_models.py make NAME config.json
    /tmp/peer/bin/python tests/support/make_hf_models.py make NAME ...    # from stored configs
    /tmp/peer/bin/python tests/support/make_hf_models.py generate NAME ...    # after make
    /tmp/peer/bin/python tests/support/make_hf_models.py train NAME ...    # after make
    /tmp/peer/bin/python tests/support/make_hf_models.py check FOLDER    # has NAME.anything, ...

A ``config.json`` may have the format before or since transformers 5; the stored ones have both.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import tempfile
from pathlib import Path

import hf_models
import numpy as np
import torch  # pyrefly: ignore (in an environment of its own)
import transformers  # pyrefly: ignore
from safetensors import safe_open

# The number of seeds of prompts that are tried.
SEEDS = 120


def load(folder):
    """The folder's model, float32, with attention by its formula."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def logits(model, tokens):
    """Those that are kept: of the whole row, and of the second document alone."""
    with torch.no_grad():
        rows = [tokens, tokens[hf_models.SPLIT :]]
        row, second = (model(torch.tensor(x[None]).long()).logits[0].numpy() for x in rows)
    count = len(tokens)
    return {"row": row[hf_models.kept(count)], "second": second[hf_models.kept_second(count)]}


def store(name, config, shapes, **arrays):
    texts = {"config": json.dumps(config, sort_keys=True), "shapes": json.dumps(shapes)}
    np.savez_compressed(hf_models.FOLDER / f"{name}.npz", **texts, **arrays)
    hf_models.golden.cache_clear()


def as_in_published_files(shapes):
    """The shapes of files of transformers, whose forms of some tensors are others.

    It cuts Olmo Hybrid's convolutions in three equal parts, and gives the MLPs of Kimi Linear's
    dense layers the name of its mixtures.
    """
    dense = re.compile(r"block_sparse_moe\.(?=(gate|up|down)_proj)")
    cut = {dense.sub("mlp.", name): shape for name, shape in shapes.items()}
    for name in shapes:
        if name.endswith("_conv1d.weight"):
            projection = name.replace("_conv1d", "_proj")
            cut[name] = [shapes[projection][0], *shapes[name][1:]]
    return cut


def make(name, config):
    """The file of a model with this ``config.json``: tensors and logits."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text(json.dumps(config))
        read = transformers.AutoConfig.from_pretrained(folder)
        transformers.AutoModelForCausalLM.from_config(read).save_pretrained(folder)
        with safe_open(folder / "model.safetensors", framework="numpy") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        store(name, config, as_in_published_files(shapes))
        found = logits(load(hf_models.write_folder(name, folder)), hf_models.row(name))
    store(name, config, hf_models.golden(name)["shapes"], **found)
    print(f"{name}: logits of {found['row'].std():.2f}")


def train(name):
    """Adds to a model's file the losses of the steps of plain gradient descent."""
    with tempfile.TemporaryDirectory() as folder:
        model = load(hf_models.write_folder(name, Path(folder))).train()
    optimizer, losses = torch.optim.SGD(model.parameters(), hf_models.RATE), []
    for step in range(hf_models.STEPS):
        row = torch.tensor(hf_models.row(name)[step : step + hf_models.TRAINED]).long()
        documents = [row, row[: hf_models.TRAINED_SPLIT], row[hf_models.TRAINED_SPLIT :]]
        sums = [
            torch.nn.functional.cross_entropy(
                model(tokens[None]).logits[0, :-1], tokens[1:], reduction="sum"
            )
            for tokens in documents
        ]
        loss = torch.stack(sums).sum() / sum(len(tokens) - 1 for tokens in documents)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    store(name, **dict(hf_models.golden(name)) | {"losses": np.asarray(losses, np.float32)})
    print(f"{name}: losses {losses}")


def generated(loaded, seeds):
    """What ``generate`` makes of the prompts of these seeds, all rows in one batch."""
    # A dynamic RoPE remembers the longest row that the model has seen.
    model = copy.deepcopy(loaded)
    prompts = hf_models.prompts(seeds)
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    ids = [np.pad(prompt, (pad, 0)) for prompt, pad in zip(prompts, padding, strict=True)]
    mask = [np.arange(longest) >= pad for pad in padding]
    found = model.generate(
        torch.tensor(np.stack(ids)).long(),
        attention_mask=torch.tensor(np.stack(mask)).long(),
        max_new_tokens=hf_models.GENERATED,
        do_sample=False,
        # Random weights know no end of a text.
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(found.logits, 1).float().numpy()
    ordered = np.sort(logits, -1)
    return {
        "seeds": np.asarray(seeds),
        "tokens": found.sequences[:, longest:].numpy().astype(np.int32),
        "margins": (ordered[..., -1] - ordered[..., -2]) / np.abs(logits).max(-1),
        "step_logits": logits[:, hf_models.KEPT_STEPS],
    }


def generate(name):
    """Adds to a model's file what it generates after prompts that lead to no near tie.

    Of the prompts without one those are taken after which a row has the most different tokens. Tied
    embeddings generate one token again and again, so a model should have a head of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(hf_models.write_folder(name, Path(folder)))
    scores = []
    for seed in range(SEEDS):
        found = generated(loaded, [seed] * len(hf_models.PROMPTS))
        clear = found["margins"].min(1) > hf_models.MARGIN
        scores.append(clear * [len(np.unique(row)) for row in found["tokens"]])
    found = generated(loaded, np.argmax(scores, 0))
    if found["margins"].min() <= hf_models.MARGIN:
        raise RuntimeError(f"{name}: no prompts without a near tie")
    store(name, **dict(hf_models.golden(name)) | found)
    print(f"{name}: seeds {found['seeds']}, smallest margin {found['margins'].min():.1e}")


def check(folder):
    """Prints how far the logits of each model saved in ``folder`` are from the kept ones."""
    for path in sorted(Path(folder).iterdir()):
        name = path.name.split(".")[0]
        found, want = logits(load(path), hf_models.row(name)), hf_models.golden(name)
        errors = [np.abs(found[k] - want[k]).max() / np.abs(want[k]).max() for k in found]
        print(f"{path.name}: relative errors {errors[0]:.1e}, {errors[1]:.1e}")


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "check":
        check(*arguments)
    elif command in ("generate", "train"):
        for name in arguments:
            {"generate": generate, "train": train}[command](name)
    elif arguments[-1].endswith(".json"):
        make(arguments[0], json.loads(Path(arguments[1]).read_text()))
    else:
        for name in arguments:
            make(name, hf_models.golden(name)["config"])
