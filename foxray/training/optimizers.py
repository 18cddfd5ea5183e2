"""Optimizers whose step may be called again after an OOM in it.

`optimizer.step()` is not idempotent: one that runs out half way leaves parameters and state of which some
have moved. `RepeatableStep` notes what a step may have moved before memory runs out in it, and puts it back
before the next try. For Adam and AdamW with `fused=True` that is next to nothing: the kernel allocates
nothing, and what does (the increment of the step counters) comes before it, so only counters have to be put
back. For any other optimizer it is everything: a copy of the parameters and of the optimizer's state, on
the same device, written before each step.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def fused_adamw(parameters: list[nn.Parameter], *, learning_rate: float) -> torch.optim.AdamW:
    """AdamW of which a repeated step costs no copy of the parameters."""
    return torch.optim.AdamW(parameters, lr=learning_rate, fused=True)


@dataclass
class _Saved:
    """One tensor that a step may move, and what it held before the step."""

    tensor: Tensor
    copy: Tensor


class RepeatableStep:
    """Steps an optimizer; after an OOM in `step()`, `step()` may simply be called again.

    The state of a fused Adam or AdamW is created at once. Costs as much device memory as the parameters and
    the optimizer's state take, except for these two, where it costs a number per parameter tensor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.moves_only_counters = _is_fused_adam(optimizer)
        """Whether an OOM in a step can have moved nothing but step counters."""
        if self.moves_only_counters:
            _materialise(optimizer)
        self._counters: list[Tensor] = []
        self._counter_copies: list[Tensor] = []
        self._parameters: list[_Saved] = []
        self._state: dict[Tensor, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        self._noted = False
        self._in_step = False

    def step(self) -> None:
        """Update the parameters from their `.grad`; exact also when an earlier call ran out of memory."""
        self.settle()
        self.note()
        self._in_step = True
        self.optimizer.step()
        self._in_step = self._noted = False

    def note(self) -> None:
        """Copy what the coming step may move, if that is not done yet; may be called again after an OOM."""
        if not self._noted:
            self._note()
            self._noted = True

    def settle(self) -> None:
        """Put back what an unfinished step has moved; without one, do nothing. Allocates nothing."""
        if self._in_step:
            self._put_back()
            self._in_step = False

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state after the last step that was finished."""
        self.settle()
        return self.optimizer.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over the tensors of a saved `state_dict()`, counters included; hyperparameters stay.

        Where the state exists its tensors are kept and filled: they are on the device, the saved ones
        need not be.
        """
        self._in_step = self._noted = False
        if not self.moves_only_counters:
            self.optimizer.load_state_dict(saved)
            return
        for index, state in enumerate(self.optimizer.state.values()):
            for name, tensor in state.items():
                tensor.copy_(saved["state"][index][name])

    @torch.no_grad()
    def _note(self) -> None:
        state = self.optimizer.state
        if self.moves_only_counters:
            self._counters = [values["step"] for values in state.values()]
            if len(self._counter_copies) != len(self._counters):
                self._counter_copies = [counter.clone() for counter in self._counters]
            torch._foreach_copy_(self._counter_copies, self._counters)
            return
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        old = {id(saved.tensor): saved.copy for saved in self._parameters}
        self._parameters = [_saved(p, old.get(id(p))) for p in parameters]
        self._groups = [
            {k: _noted(v, None) for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        self._state = {
            p: {name: _noted(value, self._old(p, name)) for name, value in values.items()}
            for p, values in state.items()
        }

    def _old(self, parameter: Tensor, name: str) -> Tensor | None:
        """The copy made for an earlier step, to be written over."""
        saved = self._state.get(parameter, {}).get(name)
        return saved.copy if isinstance(saved, _Saved) else None

    @torch.no_grad()
    def _put_back(self) -> None:
        if self.moves_only_counters:
            torch._foreach_copy_(self._counters, self._counter_copies)
            return
        for saved in self._parameters:
            saved.tensor.copy_(saved.copy)
        for group, noted in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update({name: _restored(value) for name, value in noted.items()})
        state = self.optimizer.state
        for parameter in list(state):
            if parameter not in self._state:  # created by the step that failed
                del state[parameter]
        for parameter, values in self._state.items():
            state[parameter] = {name: _restored(value) for name, value in values.items()}


def _saved(tensor: Tensor, old: Tensor | None) -> _Saved:
    if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
        return _Saved(tensor, tensor.detach().clone())
    old.copy_(tensor)
    return _Saved(tensor, old)


def _noted(value: Any, old: Tensor | None) -> Any:
    return _saved(value, old) if isinstance(value, Tensor) else copy.deepcopy(value)


def _restored(value: Any) -> Any:
    if not isinstance(value, _Saved):
        return copy.deepcopy(value)
    value.tensor.copy_(value.copy)
    return value.tensor


def _is_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    # Exactly these classes: a subclass may do anything in its step.
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and all(
        group["fused"] for group in optimizer.param_groups
    )


def _materialise(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that Adam's first step would create: one that ran out in between is not usable."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state[parameter]:
                names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device)
                } | {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in names}
