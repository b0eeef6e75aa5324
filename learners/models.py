"""Hugging Face causal language models as trainable, sharded policies. The learner's only door to transformers.

model folder --rank 0 reads--> stream of tensors --> PolicyModel, sharded, float32 masters
packed microbatch --> PolicyModel --> logprob, entropy per trained token
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learners.attention import NAME, Segments, packed_attention
from asyncrl.learners.logprobs import TokenScores, token_scores
from asyncrl.learners.packing import Microbatch
from asyncrl.learners.sharding import checkpoint_activations, materialise, shard
from asyncrl.model_tensors import expected_tensors

# Settings that change logits after the head, which the fused logprob kernel does not know.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class PolicyModel(nn.Module):
    """A causal language model that scores the trained tokens of packed microbatches.

    Attributes:
        causal_lm: the transformers model; its parameter names are those of its checkpoint.
        temperature: logits are divided by it, as the sampler does.
        source_dtype: type of the weights in the model folder, and so of exports.
    """

    def __init__(
        self, causal_lm: transformers.PreTrainedModel, *, temperature: float, source_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.temperature = temperature
        self.source_dtype = source_dtype

    @property
    def head(self) -> nn.Linear:
        """The output embedding; its weight may be that of the input embedding."""
        head = self.causal_lm.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    def forward(self, batch: Microbatch) -> TokenScores:
        """Scores of the microbatch's trained tokens, [t]."""
        head = self.head.weight
        inputs, positions, sources, targets = (
            torch.from_numpy(x).to(head.device, non_blocking=True)
            for x in (batch.input_ids, batch.position_ids, batch.sources, batch.targets)
        )
        hidden = self.causal_lm.get_decoder()(
            input_ids=inputs[None],
            position_ids=positions[None],
            attention_mask=None,
            use_cache=False,
            segments=Segments.from_runs(batch.runs, device=head.device),
        ).last_hidden_state[0]
        return token_scores(hidden[sources], head, targets, temperature=self.temperature)


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The type that "auto" stands for: bfloat16 on GPUs, float32 on CPUs."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.dtype)


def load_policy(
    config: ModelConfig,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    temperature: float = 1.0,
    activation_checkpointing: bool = False,
) -> PolicyModel:
    """Build the sharded policy of a model folder. Collective; only rank 0 reads weights.

    Raises:
        ConfigError: the folder is no causal language model, or one whose math the learner does not have.
    """
    skeleton, source_dtype = _skeleton(config)
    model = PolicyModel(skeleton, temperature=temperature, source_dtype=source_dtype)
    model.eval()  # no dropout, in training either: logprobs must be those of the policy that samples
    layers = _decoder_layers(skeleton)
    if activation_checkpointing:
        checkpoint_activations(layers)
    shard(model, layers, mesh=mesh, dtype=compute_dtype(config, device))
    materialise(model, _read_weights(config, skeleton) if dist.get_rank() == 0 else None, device=device)
    return model


def _skeleton(config: ModelConfig) -> tuple[transformers.PreTrainedModel, torch.dtype]:
    """The model without weights, float32 on the meta device, and the type that its folder declares."""
    transformers.AttentionInterface.register(NAME, packed_attention)
    try:
        hf_config = transformers.AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
        declared = hf_config.dtype if isinstance(hf_config.dtype, torch.dtype) else torch.float32
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                hf_config, dtype=torch.float32, attn_implementation=NAME, trust_remote_code=config.trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"[model] path = {config.path!r} is no causal language model that loads: {error}") from error
    changes = [key for key in _LOGIT_CHANGES if getattr(model.config, key, None) not in (None, 1.0)]
    problems = [f"config.json sets {key}" for key in changes]
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        problems.append("its output head is not a linear layer without bias")
    other_names = expected_tensors(config.path).keys() ^ {name for name, _ in model.named_parameters()}
    if other_names:
        problems.append(f"its weights have other names in memory than in the folder, e.g. {min(other_names)}")
    if not type(model)._supports_attention_backend:
        problems.append("its code does not use transformers' AttentionInterface")
    if problems:
        raise ConfigError(f"[model] path = {config.path!r}: {type(model).__name__} cannot be trained: {problems}")
    return model, declared


def _decoder_layers(model: transformers.PreTrainedModel) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _read_weights(config: ModelConfig, skeleton: transformers.PreTrainedModel) -> Mapping[str, Tensor]:
    """Full tensors in the source's own type under PolicyModel's names; the skeleton gets the generation settings."""
    source = transformers.AutoModelForCausalLM.from_pretrained(
        config.path, dtype="auto", trust_remote_code=config.trust_remote_code
    )
    skeleton.generation_config = source.generation_config
    tensors = dict(source.named_parameters()) | dict(source.named_buffers())
    return {f"causal_lm.{name}": tensor.detach() for name, tensor in tensors.items()}
