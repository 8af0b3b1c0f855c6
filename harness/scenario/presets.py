"""Real models as lists of parameters, the short campaign run on them, and what that takes in memory.

Names, shapes and order are those of ``named_parameters()`` of the Hugging Face implementation, tied weights listed
once. They are computed from the architecture's published configuration; nothing is downloaded.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from harness.errors import UsageError
from harness.scenario.model import AdamW, Build, Clip, Domain, Operation, Parameter, Part, Scenario, Step, Values
from harness.scenario.partition import round_bucket

Shapes = Iterator[tuple[str, tuple[int, ...]]]

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# What a rank has of its own before it holds any large tensor; torch itself it shares with the process it is forked
# from. Measured: 7 MiB at the start, 17 to 24 after some scenarios, at 4, 16 and 64 ranks.
PROCESS_BYTES = 32 * 2**20
_TEMPORARIES = 4  # fp32 copies of the largest parameter alive at once: draws, a converted gradient, AdamW's own
_BUCKET_BYTES = 1000  # Python's objects for one bucket in layouts, logs and lists

# Up to 510 in the sum of two: most sums need the ninth bit or the carry that rounding to bf16 would lose.
_VALUES = Values(Domain.EXACT, max_k=255, exponent=-8)
# Sums that round, so that the order of addition shows, and a few values that are subnormal, largest, inf or nan.
_ROUNDING = Values(Domain.GENERAL, max_k=255, exponent=-8, spread=20, special=9, nonfinite=True)
MAX_ROUNDING = 2**22
"""Above so many elements all gradients have exact sums: following an order takes memory for every element."""


@dataclass(frozen=True)
class Preset:
    """A named list of parameters; ``ends``: its embeddings and its output head, by name."""

    summary: str
    shapes: Callable[[], Shapes]
    ends: tuple[str, ...]


def parameters(name: str) -> tuple[Parameter, ...]:
    """The bf16 parameters of a preset, in order.

    Raises:
        UsageError: no such preset.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"no preset {name!r}, expected one of {', '.join(PRESETS)}{hint}")
    return tuple(Parameter(*named) for named in PRESETS[name].shapes())


def muon_matrices(name: str) -> tuple[Parameter, ...]:
    """Those parameters of a preset that are Muon's by custom: every 2-D matrix but embeddings and the output head.

    Raises:
        UsageError: no such preset.
    """
    listed = parameters(name)
    return tuple(item for item in listed if len(item.shape) == 2 and item.name not in PRESETS[name].ends)


def campaign(parameters: Sequence[Parameter], world: int, bucket: int, seed: int, examples: int = 3) -> list[Scenario]:
    """Scenarios of one step over the given parameters, in turn: held, spilled (two parts), clipped.

    Held and clipped ones are in the exact domain; with two contributions or more their sums need more than bf16's 8
    bits. Those of spilled ones round, unless the list is longer than :data:`MAX_ROUNDING`. Each (part, rank) is a
    contributor of its own, and each scenario has a seed of its own.

    Args:
        parameters: the model.
        world: number of ranks.
        bucket: requested bucket size, in elements.
        seed: of the first scenario; the following ones count up.
        examples: number of scenarios.
    """
    numel = sum(parameter.numel for parameter in parameters)
    # Uniform integers in [-K, K] have the variance K (K + 1) / 3. Half the norm to be expected clips for certain.
    variance = _VALUES.max_k * (_VALUES.max_k + 1) / 3
    norm = 2.0**_VALUES.exponent * math.sqrt(variance * numel * world)
    clip = Clip(float(f"{norm / 2:.3g}"))

    def part(index: int, more: bool) -> Part:
        contributors = tuple(range(index * world, (index + 1) * world))
        return Part(more, contributors, none=((),) * world)

    forms: tuple[tuple[Operation, ...], ...] = (
        (part(0, more=False),),
        (part(0, more=True), part(1, more=False)),
        (part(0, more=False), clip),
    )
    return [
        Scenario(
            world=world,
            seed=(seed + index) % 2**63,
            parameters=tuple(parameters),
            values=_ROUNDING if index % len(forms) == 1 and numel <= MAX_ROUNDING else _VALUES,
            optimizer=AdamW(),
            operations=(Build(bucket), *forms[index % len(forms)], Step()),
        )
        for index in range(examples)
    ]


def memory_estimate(parameters: Sequence[Parameter], world: int, bucket: int, num_processes: int | None = None) -> int:
    """Bytes that all ranks together hold at the peak of a scenario, on one machine.

    With N elements of which a rank's shard has S = N / world plus padding, B elements to a bucket, and w bytes to an
    element of the compute weights (bf16: 2), each rank holds:

    - for the subject: compute weights ``w N``; master, two moments and the shard's gradient ``16 S``; two buckets of
      fp32 staging ``8 B``; after a spill the host vector ``4 N``; the gradients of a part, ``w N``;
    - for the reference, unsharded on every rank: master ``4 N``, moments ``8 N``, gradient ``4 N``, weights ``w N``;
    - for both: a few fp32 tensors of the largest parameter, and the process itself, where it has one of its own.

    Args:
        parameters: the model.
        world: number of ranks on this machine.
        bucket: requested bucket size, in elements.
        num_processes: which the ranks are; None: each is one.
    """
    numel = sum(parameter.numel for parameter in parameters)
    weights = sum(parameter.numel * _BYTES[parameter.dtype] for parameter in parameters)
    largest = max(parameter.numel for parameter in parameters)
    size = round_bucket(bucket, world)
    num_buckets = -(-numel // size)
    shard = -(-numel // world) + num_buckets
    staging = 2 * 4 * min(size, numel + world)
    subject = weights + 16 * shard + staging + 4 * numel + weights
    reference = 16 * numel + weights
    both = _TEMPORARIES * 4 * largest + num_buckets * _BUCKET_BYTES
    return world * (subject + reference + both) + (num_processes or world) * PROCESS_BYTES


def _gpt2(vocabulary: int, positions: int, hidden: int, layers: int) -> Shapes:
    """GPT2LMHeadModel; its linear layers are stored input first, and the head is tied to ``wte``."""
    yield "transformer.wte.weight", (vocabulary, hidden)
    yield "transformer.wpe.weight", (positions, hidden)
    linear = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden)}
    mlp = {"mlp.c_fc": (hidden, 4 * hidden), "mlp.c_proj": (4 * hidden, hidden)}
    for layer in range(layers):
        prefix = f"transformer.h.{layer}"
        for norm, matrices in (("ln_1", linear), ("ln_2", mlp)):
            yield f"{prefix}.{norm}.weight", (hidden,)
            yield f"{prefix}.{norm}.bias", (hidden,)
            for name, shape in matrices.items():
                yield f"{prefix}.{name}.weight", shape
                yield f"{prefix}.{name}.bias", shape[1:]
    yield "transformer.ln_f.weight", (hidden,)
    yield "transformer.ln_f.bias", (hidden,)


def _llama(vocabulary: int, hidden: int, layers: int, intermediate: int, key_value: int, bias: bool) -> Shapes:
    """LlamaForCausalLM, and Qwen2ForCausalLM with ``bias``, the head tied to the embedding."""
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q_proj", hidden), ("k_proj", key_value), ("v_proj", key_value)):
            yield f"{prefix}.self_attn.{name}.weight", (rows, hidden)
            if bias:
                yield f"{prefix}.self_attn.{name}.bias", (rows,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}.mlp.gate_proj.weight", (intermediate, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (intermediate, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, intermediate)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def _mlp(*widths: int) -> Shapes:
    """Linear layers in a ``torch.nn.Sequential`` with an activation between any two."""
    for layer, (wide, narrow) in enumerate(itertools.pairwise(widths)):
        yield f"{2 * layer}.weight", (narrow, wide)
        yield f"{2 * layer}.bias", (narrow,)


_GPT2_ENDS = ("transformer.wte.weight", "transformer.wpe.weight")
_LLAMA_ENDS = ("model.embed_tokens.weight",)

PRESETS: dict[str, Preset] = {
    "tiny-mlp": Preset(
        "three linear layers, 5,898 elements in 6 tensors", lambda: _mlp(16, 64, 64, 10), ends=("4.weight",)
    ),
    "tiny-gpt": Preset(
        "GPT-2 of 2 narrow layers, 7,872 elements in 28 tensors", lambda: _gpt2(64, 16, 16, 2), ends=_GPT2_ENDS
    ),
    "gpt2": Preset(
        "GPT-2 124M, 124,439,808 elements in 148 tensors", lambda: _gpt2(50257, 1024, 768, 12), ends=_GPT2_ENDS
    ),
    "qwen2.5-0.5b": Preset(
        "Qwen2.5-0.5B, 494,032,768 elements in 290 tensors",
        lambda: _llama(151936, 896, 24, 4864, 128, bias=True),
        ends=_LLAMA_ENDS,
    ),
    "llama-3.2-1b": Preset(
        "Llama-3.2-1B, 1,235,814,400 elements in 146 tensors",
        lambda: _llama(128256, 2048, 16, 8192, 512, bias=False),
        ends=_LLAMA_ENDS,
    ),
}
