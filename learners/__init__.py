"""Learner ranks: FSDP2 training of the policy on replayed groups, and supervised fine-tuning.

Exports load on first use, so that a process which only cuts batches (`assign_groups`) imports no torch.
"""

if __name__ != "asyncrl.learners":
    raise ImportError("import this package as asyncrl.learners")

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.learners.assign import assign_groups
    from asyncrl.learners.distributed import init_distributed
    from asyncrl.learners.policy import PolicyTrainer
    from asyncrl.learners.sft import SFTTrainer

__all__ = ["PolicyTrainer", "SFTTrainer", "assign_groups", "init_distributed"]

_MODULES = {
    "PolicyTrainer": "policy",
    "SFTTrainer": "sft",
    "assign_groups": "assign",
    "init_distributed": "distributed",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
