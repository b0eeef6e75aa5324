"""Every setting of a run, as typed values. Imports neither torch nor ray.

Field docstrings are the help text of `asyncrl launch --help` and of the configuration reference. Loading from TOML,
command-line overrides and error messages are in `config_load`; checks that need the disk are in `preflight`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelConfig(Section):
    path: str
    """Folder of a Hugging Face causal language model with its tokenizer. Relative to the working directory."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type of engine and learners. auto: bfloat16 on GPUs, float32 on CPUs. Master weights are float32."""
    trust_remote_code: bool = False
    """Run Python code that the model folder brings."""


class PromptsConfig(Section):
    train: str
    """JSONL file of prompts, one object per line. Its other columns reach the reward function by name."""
    eval: str | None = None
    """JSONL file of held-out prompts with the same columns."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of {role, content} messages."""
    apply_chat_template: bool | None = None
    """Wrap string prompts as a user message of the tokenizer's chat template. Omitted: when the tokenizer has one."""
    shuffle: bool = True
    """Draw prompts in a new random order each epoch (seeded); false: file order."""


class DemonstrationsConfig(Section):
    train: str
    """JSONL file of demonstrations, one object per line."""
    eval: str | None = None
    """JSONL file of held-out demonstrations with the same columns."""
    prompt_column: str = "prompt"
    """Column with the prompt (string or messages); its tokens carry no loss."""
    response_column: str = "response"
    """Column with the answer to learn; an end-of-sequence token is added."""
    apply_chat_template: bool | None = None
    """As in the RL jobs. Omitted: when the tokenizer has one."""


class RewardConfig(Section):
    function: str
    """Reward function as "module:name" or "path/file.py:name". It is called with keyword arguments: `prompt` (text),
    `completion` (text) and the row's columns that it names. It returns a float or a dict of float parts (summed)."""
    folder: str | None = None
    """Folder in which the function is looked for and runs. Omitted: the working directory."""
    timeout_s: PositiveFloat = 10.0
    """A call that takes longer costs its rollout: recorded as failed, not trained on."""
    num_workers: PositiveInt = 1
    """Reward processes per generator."""
    memory_limit_mb: PositiveInt = 4096
    """Address-space limit of one reward process."""


class AlgorithmConfig(Section):
    name: Literal["grpo"]
    """Preset of the objective."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts per prompt."""
    groups_per_step: PositiveInt = 16
    """Prompts whose groups make one batch (and one policy version)."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps a batch is cut into."""
    anchor: Literal["recompute", "behaviour"] = "recompute"
    """The policy in the ratio pi/pi_anchor: the learner's own at the start of the batch (decoupled PPO,
    arXiv:2505.24298), or the recorded behaviour policy."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Ratio is clipped below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """Ratio is clipped above at 1 + clip_high."""
    weight: Literal["truncate", "none"] = "truncate"
    """Correction for stale or mismatched data, w = min(pi_anchor/mu, weight_max), detached (TIS). Always 1 with
    anchor = "behaviour", where pi_anchor is mu."""
    weight_max: PositiveFloat = 2.0
    """Upper bound of that weight."""
    aggregate: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over all tokens of the optimizer step, or over sequences of their token means."""


class GeneratorsConfig(Section):
    num: PositiveInt = 1
    """Generator actors, each with a vLLM engine."""
    tensor_parallel: PositiveInt = 1
    """GPUs per engine."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the learner's logprobs use the same."""
    max_new_tokens: PositiveInt = 256
    """Longest response."""
    max_model_len: PositiveInt | None = None
    """Longest prompt plus response. Omitted: longest prompt of the files plus max_new_tokens."""
    max_concurrent_rollouts: PositiveInt = 256
    """Rollouts in flight per engine."""
    kv_cache_gb: PositiveFloat | None = None
    """KV cache per engine. Omitted: 1 on CPU, what gpu_memory_utilization leaves on GPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory for the engine."""
    threads: PositiveInt = 1
    """CPU threads per engine (CPU only)."""


class LearnersConfig(Section):
    num_ranks: PositiveInt = 2
    """FSDP2 ranks: one GPU each, or one CPU process each."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: GPUs where the cluster has some. cpu: leaves all GPUs to the engines, for small models."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up, until the last step."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate of linear and cosine, as a share of lr."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW betas."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Tokens packed into one forward pass of one rank. A longer row gets a microbatch of its own."""
    activation_checkpointing: bool = False
    """Recompute activations of decoder layers in the backward pass."""
    threads: PositiveInt = 1
    """CPU threads per rank (CPU only)."""


class BufferConfig(Section):
    num_shards: PositiveInt = 2
    """Shard processes of the replay buffer."""
    durability: Literal["memory", "disk", "fsync"] = "memory"
    """Where trajectories lie. memory: shared memory, which survives the death of any process. disk: files in the run
    folder, which survive the machine once its kernel has written them. fsync: on disk before a generator goes on."""
    capacity_gb: PositiveFloat = 16.0
    """Most gigabytes per shard; a full shard makes generators wait."""
    memory_gb: PositiveFloat | None = None
    """durability = "memory": gigabytes of shared memory per shard, beyond which the oldest trajectories move to the run
    folder. Omitted: never."""
    keep: bool = False
    """durability = "disk" or "fsync": keep every trajectory of the run in its folder, also after training on it."""
    sampling: Literal["fifo", "freshest", "uniform", "prioritized"] = "fifo"
    """Which stored groups a step takes: oldest tickets first, newest policy versions first, any with equal chance, or
    in proportion to the spread of their rewards."""
    max_uses: PositiveInt = 1
    """uniform and prioritized: how often a group is trained on."""
    stale: Literal["pace", "drop", "wait"] = "pace"
    """What keeps trajectories within max_staleness. pace: a group is started only if it can be trained in time, late
    ones are dropped. drop: generators never wait, all that ages out is dropped. wait: groups are trained strictly in
    the order of their tickets, the learners wait for slow ones, nothing is dropped."""
    lease_timeout_s: PositiveFloat = 60.0
    """A batch whose holder, the coordinator, died is free again after this time."""


class EvalConfig(Section):
    every: PositiveInt = 10
    """Policy versions between evaluations; also before the first and after the last step."""


class RolloutEvalConfig(EvalConfig):
    samples_per_prompt: PositiveInt = 1
    """Rollouts per held-out prompt, sampled at the training temperature."""


class CheckpointConfig(Section):
    every: NonNegativeInt = 0
    """Steps between saved model folders. 0: only at the end."""


class JobConfig(Section):
    """What every job has."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Name of the run; its folder is runs_dir/NAME-TIME, and runs_dir/NAME-latest links to the newest."""
    runs_dir: str = "runs"
    """Where run folders go."""
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Seed of sampling, shuffling and initialisation."""
    steps: PositiveInt
    """Batches to train on."""
    model: ModelConfig
    learners: LearnersConfig = LearnersConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


class RLConfig(JobConfig):
    """Reinforcement learning: generators -> buffer -> learners."""

    job: Literal["rl"]
    mode: Literal["async", "sync"] = "async"
    """async: generators and learners run at the same time; sync: lock step, bitwise repeatable."""
    max_staleness: PositiveInt = 2
    """async: oldest behaviour version that may be trained on, in versions behind the learner. sync: always 0."""
    data: PromptsConfig
    reward: RewardConfig
    algorithm: AlgorithmConfig
    generators: GeneratorsConfig = GeneratorsConfig()
    buffer: BufferConfig = BufferConfig()
    eval: RolloutEvalConfig = RolloutEvalConfig()

    @property
    def staleness_bound(self) -> int:
        """The bound in force: 0 in sync mode."""
        return 0 if self.mode == "sync" else self.max_staleness

    @property
    def first_version(self) -> int:
        """The policy version that the initial weights are."""
        return 0

    @property
    def num_generators(self) -> int:
        """Generator actors that the job starts."""
        return self.generators.num

    @model_validator(mode="after")
    def _sizes_divide(self) -> RLConfig:
        a, ranks = self.algorithm, self.learners.num_ranks
        per_update = a.groups_per_step // a.num_minibatches
        problems = []
        if a.groups_per_step % a.num_minibatches:
            problems.append(
                f"[algorithm] num_minibatches must divide groups_per_step = {a.groups_per_step}; "
                f"got {a.num_minibatches}"
            )
        elif per_update % ranks:
            problems.append(
                f"[learners] num_ranks must divide the {per_update} groups of one optimizer step "
                f"([algorithm] groups_per_step / num_minibatches); got {ranks}"
            )
        if self.generators.max_concurrent_rollouts < a.group_size:
            problems.append(
                f"[generators] max_concurrent_rollouts must hold one group ([algorithm] group_size) of {a.group_size}; "
                f"got {self.generators.max_concurrent_rollouts}"
            )
        problems += self._buffer_problems()
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _buffer_problems(self) -> list[str]:
        b, problems = self.buffer, []
        if b.keep and b.durability == "memory":
            problems.append('[buffer] keep = true needs durability = "disk" or "fsync"')
        if b.memory_gb is not None and b.durability != "memory":
            problems.append(f'[buffer] memory_gb needs durability = "memory"; got "{b.durability}"')
        if b.max_uses > 1 and b.sampling not in ("uniform", "prioritized"):
            problems.append(
                f'[buffer] max_uses = {b.max_uses} needs sampling = "uniform" or "prioritized"; got "{b.sampling}"'
            )
        if b.stale == "wait" and b.sampling != "fifo":
            problems.append(f'[buffer] stale = "wait" needs sampling = "fifo"; got "{b.sampling}"')
        if self.mode == "sync" and (b.sampling, b.max_uses, b.stale) != ("fifo", 1, "pace"):
            problems.append(
                'mode = "sync" trains each batch once, as it was generated: [buffer] sampling, max_uses and stale must '
                "keep their defaults"
            )
        return problems


class OfflineConfig(RLConfig):
    """An RL job that trains on stored groups, without generators (`asyncrl buffer replay`).

    Its clock goes on where that of the stored groups ended, so that every one of them is in the past, and the staleness
    bound is that of the oldest at the last step: it is measured, nothing is dropped for it.
    """

    oldest_version: int = Field(exclude=True)
    """Oldest policy version that sampled a stored group."""
    newest_version: int = Field(exclude=True)
    """Newest policy version that sampled a stored group."""

    @property
    def staleness_bound(self) -> int:
        return self.first_version + self.steps - 1 - self.oldest_version

    @property
    def first_version(self) -> int:
        return self.newest_version + 1

    @property
    def num_generators(self) -> int:
        return 0


class SFTConfig(JobConfig):
    """Supervised fine-tuning on prompt/response demonstrations."""

    job: Literal["sft"]
    batch_size: PositiveInt = 64
    """Demonstrations per optimizer step, over all ranks."""
    data: DemonstrationsConfig
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _sizes_divide(self) -> SFTConfig:
        if self.batch_size % self.learners.num_ranks:
            raise ValueError(
                f"[learners] num_ranks must divide batch_size = {self.batch_size}; got {self.learners.num_ranks}"
            )
        return self


JOBS: dict[str, type[JobConfig]] = {"rl": RLConfig, "sft": SFTConfig}
"""Value of the top-level key `job` -> its configuration."""
