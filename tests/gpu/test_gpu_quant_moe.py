"""QuantMoE on the GPU against a loop over tokens and experts in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cuda_library import ACTIVATIONS, DTYPES, FORMATS, SCORINGS, CudaLibrary, MoeDesc, poisoned
from matrices import int4_weights, relative_error

Tensor = torch.Tensor
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Moe:
    """A layer's shape and rules, as eb_moe_desc has them."""

    experts: int = 8
    top_k: int = 2
    hidden: int = 256
    intermediate: int = 128
    scoring: str = "softmax"
    renormalize: bool = True
    num_groups: int = 0
    top_groups: int = 0
    routed_scale: float = 1.0
    activation: str = "silu"
    block: int = 64
    symmetric: bool = True
    clamp: float = 0.0
    io: torch.dtype = BF16
    format: str = "i4"

    def desc(self) -> object:
        return MoeDesc(
            *(self.experts, self.top_k, self.hidden, self.intermediate, SCORINGS.index(self.scoring)),
            *(int(self.renormalize), self.num_groups, self.top_groups, self.routed_scale),
            *(
                ACTIVATIONS.index(self.activation),
                FORMATS[self.format],
                self.block if self.format == "i4" else 0,
                int(self.symmetric),
                DTYPES[self.io],
            ),
            *(self.clamp, 1.702),
        )


class Experts:
    """Packed experts and the weights they unpack to."""

    def __init__(self, library: CudaLibrary, moe: Moe, generator: torch.Generator) -> None:
        gate_up, down = [], []
        self.gate_up, self.down = [], []
        strides = library.expert_strides(moe.desc())
        for _ in range(moe.experts):
            for n, k, packed, plain, stride in (
                (2 * moe.intermediate, moe.hidden, gate_up, self.gate_up, strides[0]),
                (moe.hidden, moe.intermediate, down, self.down, strides[1]),
            ):
                desc, host = _packed(library, moe, n, k, generator)
                plain.append(library.unpack(desc, host).cuda().double())
                packed.append(torch.nn.functional.pad(host, (0, stride - len(host))))
        self.packed = {"gate_up": torch.cat(gate_up).cuda(), "down": torch.cat(down).cuda()}


def _packed(
    library: CudaLibrary, moe: Moe, n: int, k: int, generator: torch.Generator
) -> tuple[object, Tensor]:
    """One matrix [n, k] in the layer's format: its descriptor and its packed bytes on the host."""
    if moe.format == "i4":
        desc = library.linear_desc(k, n, "i4", moe.io, moe.block, moe.symmetric)
        return desc, library.pack(desc, *int4_weights(n, k, moe.block, moe.symmetric, generator))
    desc = library.linear_desc(k, n, moe.format, moe.io)
    w = 0.05 * torch.randn(n, k, device="cuda", generator=generator).cpu()
    if moe.format != "f8":
        return desc, library.pack(desc, w.to(moe.io))
    scales = w.abs().amax(1) / 448
    return desc, library.pack(desc, (w / scales[:, None]).to(torch.float8_e4m3fn), scales)


def route(moe: Moe, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(experts [T, k], weights [T, k]) in float64; the lower expert first among equals."""
    logits = logits.double()
    scores = {
        "softmax": lambda: torch.softmax(logits, 1),
        "sigmoid": lambda: torch.sigmoid(logits),
        "softmax_topk": lambda: logits,
    }[moe.scoring]()
    choice = scores if bias is None else scores + bias.double()
    if moe.num_groups > 1:
        groups = choice.view(len(choice), moe.num_groups, -1)
        rank = groups.max(2).values if bias is None else groups.topk(2, 2).values.sum(2)
        kept = torch.sort(rank, dim=1, descending=True, stable=True).indices[:, : moe.top_groups]
        mask = torch.full_like(rank, -torch.inf).scatter_(1, kept, 0.0)
        choice = (groups + mask[:, :, None]).view_as(choice)
    chosen = torch.sort(choice, dim=1, descending=True, stable=True).indices[:, : moe.top_k]
    weights = scores.gather(1, chosen)
    if moe.scoring == "softmax_topk":
        weights = torch.softmax(weights, 1)
    if moe.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return chosen, weights * moe.routed_scale


def expected(
    moe: Moe,
    experts: Experts,
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """Rounded to the io dtype where the kernel stores: the gated rows and each expert's answer."""
    chosen, weights = route(moe, logits, bias)
    out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    for e in range(moe.experts):
        token, slot = (chosen == e).nonzero(as_tuple=True)
        h = x[token].double() @ experts.gate_up[e].T
        if up_bias is not None:
            h = h + up_bias[e].double()
        gate, up = h.chunk(2, 1)
        if moe.clamp:
            gate, up = gate.clamp(max=moe.clamp), up.clamp(-moe.clamp, moe.clamp)
            a = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        else:
            a = torch.nn.functional.silu(gate) * up if moe.activation == "silu" else torch.relu(gate) * up
        y = a @ experts.down[e].T
        if down_bias is not None:
            y = y + down_bias[e].double()
        out.index_add_(0, token, y * weights[token, slot][:, None])
    return out


RULES = {
    "mixtral": {},
    "plain_softmax": {"renormalize": False},
    "softmax_topk": {"scoring": "softmax_topk", "renormalize": False},
    "sigmoid": {"scoring": "sigmoid", "routed_scale": 2.5},
    "groups": {"experts": 32, "top_k": 4, "num_groups": 8, "top_groups": 3, "scoring": "sigmoid"},
    "many": {"experts": 128, "top_k": 8},
    "clamped": {"clamp": 2.0, "symmetric": False},
    "relu": {"activation": "relu", "block": 128, "io": torch.float16},
    "all": {"experts": 4, "top_k": 4},
    "float16": {"format": "f16", "io": torch.float16, "hidden": 272, "intermediate": 80},
    "bfloat16": {"format": "bf16", "clamp": 2.0, "symmetric": True},
    "float8": {"format": "f8", "hidden": 144, "intermediate": 208},
    "float8, float16": {"format": "f8", "io": torch.float16, "experts": 16, "top_k": 4},
    "ragged": {"hidden": 448, "intermediate": 320, "block": 64, "symmetric": False, "io": torch.float16},
}


@pytest.mark.parametrize("rule", RULES)
def test_matches_the_loop_over_experts(library: CudaLibrary, generator: torch.Generator, rule: str) -> None:
    moe = Moe(**RULES[rule])
    experts = Experts(library, moe, generator)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=generator)

    for tokens in (1, 2, 15, 16, 17, 63, 64, 65, 300):
        x = randn(tokens, moe.hidden).to(moe.io)
        logits = 2 * randn(tokens, moe.experts)
        bias = 0.3 * randn(moe.experts) if moe.num_groups else None
        biases = (
            (randn(moe.experts, 2 * moe.intermediate), randn(moe.experts, moe.hidden))
            if moe.clamp
            else (None, None)
        )
        y = library.moe(
            moe.desc(),
            x,
            router_logits=logits,
            correction_bias=bias,
            gate_up_bias=biases[0],
            down_bias=biases[1],
            **experts.packed,
        )
        assert relative_error(y, expected(moe, experts, x, logits, bias, *biases)) < 3 * {BF16: 2.0**-8}.get(
            moe.io, 2.0**-10
        )


@pytest.mark.parametrize("tokens", [1, 63, 99, 257])
def test_all_tokens_to_one_expert_and_none_to_others(
    library: CudaLibrary, generator: torch.Generator, tokens: int
) -> None:
    """K03: every token to experts 5 and 1; the other six get none."""
    moe = Moe()
    experts = Experts(library, moe, generator)
    x = torch.randn(tokens, moe.hidden, device="cuda", generator=generator).to(BF16)
    logits = torch.full((tokens, 8), -50.0, device="cuda")
    logits[:, 5], logits[:, 1] = 3.0, 1.0
    y = library.moe(moe.desc(), x, router_logits=logits, **experts.packed)
    assert relative_error(y, expected(moe, experts, x, logits, None, None, None)) < 3 * 2.0**-8


def test_a_nan_stays_with_its_token(library: CudaLibrary, generator: torch.Generator) -> None:
    moe = Moe()
    experts = Experts(library, moe, generator)
    x = torch.randn(20, moe.hidden, device="cuda", generator=generator).to(BF16)
    logits = torch.randn(20, 8, device="cuda", generator=generator)
    good = library.moe(moe.desc(), x, router_logits=logits, **experts.packed)
    logits[7, 3] = torch.nan
    y = library.moe(moe.desc(), x, router_logits=logits, **experts.packed)
    keep = torch.arange(20, device="cuda") != 7
    assert torch.equal(y[keep], good[keep])
    assert y[7].isnan().all()


def test_weights_of_the_chosen(library: CudaLibrary, generator: torch.Generator) -> None:
    """K01: logits [2, 1, 0, -1], k = 2 give .6439 and .2369 as they are, .7311 and .2689 renormalised."""
    logits = torch.tensor([[2.0, 1, 0, -1]])
    for renormalize, weights in ((False, [0.6439, 0.2369]), (True, [0.7311, 0.2689])):
        moe = Moe(experts=4, renormalize=renormalize)
        chosen, got = route(moe, logits, None)
        assert chosen.tolist() == [[0, 1]]
        assert torch.allclose(got, torch.tensor([weights], dtype=torch.float64), atol=5e-5)
        experts = Experts(library, moe, generator)
        x = torch.randn(1, moe.hidden, device="cuda", generator=generator).to(BF16)
        y = library.moe(moe.desc(), x, router_logits=logits.cuda(), **experts.packed)
        assert relative_error(y, expected(moe, experts, x, logits.cuda(), None, None, None)) < 3 * 2.0**-8


def test_a_captured_graph_follows_the_routing(library: CudaLibrary, generator: torch.Generator) -> None:
    moe = Moe()
    experts = Experts(library, moe, generator)
    x = torch.randn(40, moe.hidden, device="cuda", generator=generator).to(BF16)
    logits = torch.randn(40, 8, device="cuda", generator=generator)
    y, workspace = poisoned((40, moe.hidden), BF16), library.moe_workspace(moe.desc(), 40)
    library.moe(moe.desc(), x, y, workspace, router_logits=logits, **experts.packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        library.moe(moe.desc(), x, y, workspace, router_logits=logits, **experts.packed)
    for _ in range(3):
        x.copy_(torch.randn(40, moe.hidden, device="cuda", generator=generator))
        logits.copy_(3 * torch.randn(40, 8, device="cuda", generator=generator))
        y.fill_(torch.nan)
        graph.replay()
        assert relative_error(y, expected(moe, experts, x, logits, None, None, None)) < 3 * 2.0**-8
