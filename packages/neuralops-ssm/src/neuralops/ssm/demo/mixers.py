"""Token mixers: what lets a position see those before it. One class for each operator.

A new mixer subclasses :class:`Mixer` and joins :data:`MIXERS`; the model, the checkpoint and the
command line need nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn
from torch.nn import functional

from neuralops.core import Explanation, explain
from neuralops.ssm import gdn_scan, gdn_step, gla_scan, gla_step, hgrn2_scan, hgrn2_step

Tensor = torch.Tensor
State = tuple[Tensor, ...]


class Mixer(nn.Module, ABC):
    """Mixes tokens causally and carries a state, so that a sequence can be cut anywhere.

    Args of the constructor of every subclass: `width`, the channels that come and go, and `depth`
    in [0, 1), how far up the model this mixer sits.
    """

    @abstractmethod
    def __init__(self, width: int, depth: float) -> None:
        super().__init__()

    @abstractmethod
    def initial_state(self, batch: int) -> State:
        """Return the state before the first token."""

    @abstractmethod
    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Mix a whole sequence ``x (B, L, width)``."""

    @abstractmethod
    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Mix one token ``x (B, width)``."""

    @abstractmethod
    def explain(self, x: Tensor) -> Explanation:
        """Tell on which backend the operator would run for ``x (B, L, width)``."""


class ShortConv(nn.Module):
    """A causal convolution of each channel over a few tokens; it starts as the identity."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        weight = 0.1 * torch.randn(taps, width)
        weight[-1] += 1
        self.weight = nn.Parameter(weight)

    def initial_state(self, batch: int) -> Tensor:
        """Return what comes before the first token: zeros ``(B, taps - 1, width)``."""
        taps, width = self.weight.shape
        return self.weight.new_zeros(batch, taps - 1, width)

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve ``x (B, L, width)``, which follows ``before``."""
        taps, length = self.weight.shape[0], x.shape[1]
        padded = torch.cat((before, x), 1)
        y = x * self.weight[-1]
        for tap in range(taps - 1):
            y = torch.addcmul(y, padded[:, tap : tap + length], self.weight[tap])
        return y, padded[:, length:]


class HGRN2Mixer(Mixer):
    """The gated elementwise recurrence between a short convolution and an output gate.

    Forget gates of higher layers have a higher lower bound, so that these look further back.

    Source: Qin et al., *Hierarchically Gated Recurrent Neural Network for Sequence Modeling*,
    [arXiv 2311.04823](https://arxiv.org/abs/2311.04823).
    """

    EXPANSION = 1.5
    TAPS = 4

    def __init__(self, width: int, depth: float) -> None:
        super().__init__(width, depth)
        self.channels = int(self.EXPANSION * width)
        self.lower_bound = 0.8 * depth
        self.conv = ShortConv(width, self.TAPS)
        self.enter = nn.Linear(width, 3 * self.channels, bias=False)
        self.forget_bias = nn.Parameter(torch.linspace(0, 5, self.channels))
        self.norm = nn.RMSNorm(self.channels)
        self.leave = nn.Linear(self.channels, width, bias=False)
        nn.init.normal_(self.leave.weight, std=0.02)

    def initial_state(self, batch: int) -> State:
        """Return the convolution's past and the recurrence's state, both zero."""
        return self.conv.initial_state(batch), self.forget_bias.new_zeros(batch, self.channels)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Mix a whole sequence ``x (B, L, width)``."""
        x, before = self.conv(x, state[0])
        f, iv, gate = self._enter(x)
        h, hidden = hgrn2_scan(f, iv, initial_state=state[1], return_final_state=True)
        return self._leave(h, gate), (before, hidden)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Mix one token ``x (B, width)``."""
        x, before = self.conv(x.unsqueeze(1), state[0])
        f, iv, gate = self._enter(x.squeeze(1))
        h, hidden = hgrn2_step(f, iv, state[1])
        return self._leave(h, gate), (before, hidden)

    def explain(self, x: Tensor) -> Explanation:
        """Tell on which backend :func:`neuralops.ssm.hgrn2_scan` would run."""
        f, iv, _ = self._enter(x)
        return explain(hgrn2_scan, f, iv)

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        f, i, gate = self.enter(x).chunk(3, -1)
        f = self.lower_bound + (1 - self.lower_bound) * torch.sigmoid(f + self.forget_bias)
        return f, (1 - f) * functional.silu(i), gate

    def _leave(self, h: Tensor, gate: Tensor) -> Tensor:
        leave: Tensor = self.leave(self.norm(h) * functional.silu(gate))
        return leave


class GDNMixer(Mixer):
    """The gated delta rule between a short convolution and an output gate.

    Source: Yang, Kautz and Hatamizadeh, *Gated Delta Networks: Improving Mamba2 with Delta Rule*,
    [arXiv 2412.06464](https://arxiv.org/abs/2412.06464).
    """

    HEAD_WIDTH = 32
    TAPS = 4

    def __init__(self, width: int, depth: float) -> None:
        super().__init__(width, depth)
        self.heads = max(1, width // self.HEAD_WIDTH)
        self.channels = self.heads * self.HEAD_WIDTH
        self.conv = ShortConv(width, self.TAPS)
        self.enter = nn.Linear(width, 4 * self.channels, bias=False)
        self.gates = nn.Linear(width, 2 * self.heads)
        with torch.no_grad():
            self.gates.bias[: self.heads] = torch.linspace(2, 6, self.heads)
        self.norm = nn.RMSNorm(self.HEAD_WIDTH)
        self.leave = nn.Linear(self.channels, width, bias=False)
        nn.init.normal_(self.leave.weight, std=0.02)

    def initial_state(self, batch: int) -> State:
        """Return the convolution's past and the recurrence's state, both zero."""
        hidden = self.gates.bias.new_zeros(batch, self.heads, self.HEAD_WIDTH, self.HEAD_WIDTH)
        return self.conv.initial_state(batch), hidden

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Mix a whole sequence ``x (B, L, width)``."""
        x, before = self.conv(x, state[0])
        *tokens, gate = self._enter(x)
        o, hidden = gdn_scan(
            *tokens, normalize_qk=True, initial_state=state[1], return_final_state=True
        )
        return self._leave(o, gate), (before, hidden)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Mix one token ``x (B, width)``."""
        x, before = self.conv(x.unsqueeze(1), state[0])
        *tokens, gate = self._enter(x)
        q, k, v, beta, alpha = (token.squeeze(2) for token in tokens)
        o, hidden = gdn_step(q, k, v, beta, alpha, state[1], normalize_qk=True)
        return self._leave(o.unsqueeze(2), gate).squeeze(1), (before, hidden)

    def explain(self, x: Tensor) -> Explanation:
        """Tell on which backend :func:`neuralops.ssm.gdn_scan` would run."""
        *tokens, _ = self._enter(x)
        return explain(gdn_scan, *tokens, normalize_qk=True)

    def _enter(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, v, beta, alpha as the scan takes them, and the output gate."""
        *tokens, gate = self.enter(x).chunk(4, -1)
        q, k, v = (functional.silu(token).unflatten(-1, (self.heads, -1)) for token in tokens)
        alpha, beta = torch.sigmoid(self.gates(x)).chunk(2, -1)
        return *(token.transpose(1, 2) for token in (q, k, v, beta, alpha)), gate

    def _leave(self, o: Tensor, gate: Tensor) -> Tensor:
        o = self.norm(o.transpose(1, 2)).flatten(2)
        leave: Tensor = self.leave(o * functional.silu(gate))
        return leave


class GLAMixer(Mixer):
    """Gated linear attention between a short convolution and an output gate.

    As in HGRN2 a key is scaled by 1 minus its gate: a channel that keeps much takes little.

    Source: Yang et al., *Gated Linear Attention Transformers with Hardware-Efficient Training*,
    [arXiv 2312.06635](https://arxiv.org/abs/2312.06635).
    """

    HEADS = 4
    TAPS = 4

    def __init__(self, width: int, depth: float) -> None:
        super().__init__(width, depth)
        self.keys, self.values = width // 2, width
        self.conv = ShortConv(width, self.TAPS)
        self.enter = nn.Linear(width, 3 * self.keys + 2 * self.values, bias=False)
        self.gate_bias = nn.Parameter(torch.linspace(0, 5, self.keys))
        self.norm = nn.RMSNorm(self.values // self.HEADS)
        self.leave = nn.Linear(self.values, width, bias=False)
        nn.init.normal_(self.leave.weight, std=0.02)

    def initial_state(self, batch: int) -> State:
        """Return the convolution's past and the recurrence's state, both zero."""
        shape = (batch, self.HEADS, self.keys // self.HEADS, self.values // self.HEADS)
        return self.conv.initial_state(batch), self.gate_bias.new_zeros(shape)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Mix a whole sequence ``x (B, L, width)``."""
        x, before = self.conv(x, state[0])
        *tensors, gate = self._enter(x)
        q, k, v, logs = (tensor.transpose(1, 2) for tensor in tensors)
        o, hidden = gla_scan(
            q, k, v, logs, scale=q.shape[-1] ** -0.5, log_decay=True,
            initial_state=state[1], return_final_state=True,
        )  # fmt: skip
        return self._leave(o.transpose(1, 2), gate), (before, hidden)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Mix one token ``x (B, width)``."""
        x, before = self.conv(x.unsqueeze(1), state[0])
        q, k, v, logs, gate = self._enter(x.squeeze(1))
        scale = q.shape[-1] ** -0.5
        o, hidden = gla_step(q, k, v, logs, state[1], scale=scale, log_decay=True)
        return self._leave(o, gate), (before, hidden)

    def explain(self, x: Tensor) -> Explanation:
        """Tell on which backend :func:`neuralops.ssm.gla_scan` would run."""
        *tensors, _ = self._enter(x)
        return explain(gla_scan, *(tensor.transpose(1, 2) for tensor in tensors), log_decay=True)

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys, values, the gates' logarithms ``(..., H, D)``, the output gate."""
        sizes = [self.keys, self.keys, self.keys, self.values, self.values]
        q, k, logs, v, gate = self.enter(x).split(sizes, -1)
        logs = functional.logsigmoid(logs + self.gate_bias)
        k = k * (1 - logs.exp())
        q, k, v, logs = (y.unflatten(-1, (self.HEADS, -1)) for y in (q, k, v, logs))
        return q, k, v, logs, gate

    def _leave(self, o: Tensor, gate: Tensor) -> Tensor:
        leave: Tensor = self.leave(self.norm(o).flatten(-2) * functional.silu(gate))
        return leave


MIXERS: dict[str, type[Mixer]] = {"gdn": GDNMixer, "gla": GLAMixer, "hgrn2": HGRN2Mixer}
