"""How times are taken, in words."""

METHOD = """\
- **Right first, in turn.** A result is compared with fp64 or fp32 before it is timed; a wrong one
  has no time. Implementations alternate in bursts of 20 ms, with the GPU idle in between, on inputs
  that rotate; times are medians ([more](docs/records/README.md#how-it-is-measured)).
- **Same work.** Layouts and gates that a library wants otherwise are converted outside the time.
  Versions of all rivals: [versions](docs/versions.md).
- **Your own**: `bash scripts/setup_env.sh --rivals` brings most rivals to `.venv` (1.3 GB); then,
  on a Hopper GPU, `.venv/bin/python -m benchmarks.sm90 gdn --heads 16/32 --lengths 4096x2` times a
  shape of yours. [Other gates and sizes, these rows again, several
  GPUs](docs/records/README.md#your-own-times)."""

COMPILED = """\
So the host takes longer for our eager calls than with a wheel with kernels; to time these, run
`python -m qla_kernels.build --out FOLDER`, and set QLA_PREBUILT=FOLDER."""

YOUR_OWN = """\
`bash scripts/setup_env.sh --rivals` installs FlashQLA, FlashInfer, FLA and flash-attn-4 into
`.venv` (1.3 GB; not nvcc, which [building kernels](../installation.md#building-wheels) needs);
[causal-conv1d, and the functions of vLLM and SGLang](../installation.md#which-one), come otherwise.
`.venv/bin/python -m qla_kernels.build --out FOLDER` makes kernels, 20 minutes on two cores; with
`QLA_PREBUILT=FOLDER` they are launched as published eager times have it. Then, on a Hopper GPU:

- A shape of yours: `.venv/bin/python -m benchmarks.sm90 gdn --heads 16/32 --lengths 4096x2`;
  `--gates model --head-dim 96/192` for other gates and sizes. Gates and initial states are those
  of the front page unless you say otherwise. `conv --heads 16/32 --lengths 4096x8` times its
  channels, `dualkv --heads 8/32 --lengths 16x4096+512` shared prompts, `sparse_ring --heads 8/32
  --lengths 128k --density 0.05 --run 4` a mask, `hybrid --lengths 8x16384+2048` a block, `model
  --lengths 4096x2` layers of two models.
- Lengths: `48x1` is one sequence of 48 tokens, `1x48` is 48 sequences of one token, `24576+8192` a
  pack of two; `16x4096+512` are 16 responses to a prompt, `4 of 16x4096+512` four such groups.
- `--direction` is `fwd` (without gradients) and `bwd` (what follows a forward) by default; `both`
  is forward and backward in one. Of gdn also `decode` (`1x64`: a token of each of 64 sequences,
  states given and returned), `pool_decode` (the same in a pool of states, as engines call it),
  `drafts` (`4x64`: verifies 4 tokens of each in the pool) and `pool_prefill` (prompts, from and
  into it).
- A model or config of yours, with and without `swap(model)`:
  [a program](../integrations.md#time-your-own-model).
- What a run leaves in `--out`, a folder of your own for each run that you keep: FAMILY.md, its
  tables, to show people; FAMILY.json, the record, from which `.venv/bin/python -m benchmarks.report
  --record PATH` prints all of it, elsewhere too; FAMILY.log, what libraries print; with `--plot`
  figures (SVG). To share times, share the first two. `--save` refuses shapes of your own.
- Words in place of a time: *wrong*, the result is off, and has no time; *unsupported*, ours refuses
  the call; *out of memory*; *time limit*, nothing happened for minutes (`--limit`, for first
  calls); *died*, the process ended; *failed*, any other error. The lines below a table give
  reasons. A library that is *missing* is not installed, or needs a GPU. `–`: it has no such call.
- One row of a page: `gdn --quick --only 'gdn-fwd-16x32-8192x1-*' --impl ours,flashinfer`; `--list`
  prints the names. A quick set takes one to ten minutes with its kernels compiled, rivals a minute
  more for each head shape that is new to them.
- Rows with names: `gdn --quick --direction fwd,bwd,both`, `gdn --set sizes`, `gdn --set decode`,
  `gdn --set serving --quick`, `gdn --set serving-parallel`, `dualkv --quick --set long,short`,
  `sparse_ring --quick`, `hybrid --quick` and `model`. `--save` appends them to
  `benchmarks/results`, and `python -m benchmarks.report` writes the pages. Each record's command is
  beside it.
- Two versions of ours: `git worktree add ../before COMMIT`, then `.venv/bin/python -m
  benchmarks.revisions ../before gdn:anchors`.
- Several GPUs that share one sequence: `.venv/bin/torchrun --nproc-per-node 2 scripts/gdn_ranks.py
  --out FOLDER` (`--cpu` to see it run), with `--tokens`, `--heads`, `--head-dim` and `--gates`;
  `--save` as above, for any shape. Results are compared with ours in the contiguous layout. Rings:
  `torchrun --nproc-per-node N -m benchmarks.ring`.
- Whole steps of the Trainer and, where TRL is installed, of GRPO, with random weights: `python
  scripts/trainer_steps.py finetune` and `grpo`, with `--tiny` to see it run
  ([what an H100 took](../notes/whole-steps.md))."""

WORKLOADS = """\
`python -m benchmarks.sm90 gdn --set NAME,...` runs the sets below, `--list` prints their
workloads, `--quick` means `anchors`. `--warm 8` only compiles, in eight processes, so that the
run after it finds everything cached; `--cold` fills the L2 cache with other data before each
call. `--out` (`out/`) gets the table and FAMILY.json of the run, until the next one of the family;
`--save` appends its rows to `benchmarks/results/DATE-DEVICE.jsonl`, from which `python -m
benchmarks.report` writes these pages. Shapes of your own stay in `--out`: pages show named rows.

Gates are `model` (-exp(A_log) softplus(a + dt_bias), from hardly any to nearly total decay)
or `published` (as FlashQLA publishes with: logsigmoid(x) / 16, and 0 for a quarter of the heads).
Heads are key heads / value heads, of size 128.

`forward` is every head configuration at every length, `backward` training's, `short` rollouts of
many short sequences. `filled` has the rows whose sequences and heads fill the GPU without cutting
any, `segments` single sequences of few heads, which are cut; `--impl ours,ours_whole` times them
uncut, too. `decode` is `fused_recurrent_gated_delta_rule` on batches of a few tokens, with fp32
states given and returned, nearly all of its bytes. `kernels` times single kernels.

`serving` is what an inference engine calls, and `serving --quick` twelve rows of it; each of its
parts is a set, too. States lie in a pool of slots [HV, V, K] in random order, in pages that are
longer than a state; slot 0 is no state. `serving-prefill` has 1, 8 and 64 prompts, every third one
without an initial state, in pools in fp32 and bf16; it reads some slots and writes others, as
behind a prefix cache. `serving-checkpoints` also keeps the state after every 256 tokens.
`serving-decode` is a token of each sequence, one sequence in sixteen being padding,
`serving-drafts` 2, 4 or 8 tokens with the state after each kept, beside our decode step of the same
batch, `serving-step` convolution, rule, norm and gate of a layer. Rivals are FlashInfer with
gathers and scatters around it, FlashInfer in the pool, and the Triton functions of vLLM 0.33.0 and
SGLang 0.5.23, with a Triton norm of ours behind them in `serving-step`. SGLang keeps the states of
drafts in a buffer. The smallest batches stay in the L2 cache between calls, for everyone.
`serving-parallel`, which `serving` does not contain, is one call of each kind with the heads of a
whole layer and of one of two, four or eight GPUs that share it.

`model` rows are four layers of a model of transformers in training, three of them gated delta nets,
with PyTorch's attention, MLPs, and random weights: of Qwen3.5-9B (hidden size 4096, MLPs of 12288)
and of OLMo Hybrid (3840, 11008); a row of the batch is a sequence. `--set fla` is FLA's layer of
hidden size 2048, as it is made by default. A step of `ours` has our rule and our convolution,
`ours_rule` the rule alone; there, and in FLA's, PyTorch convolves, as in transformers without
causal-conv1d, which is what `fla_conv` has.

`hybrid` rows are `dualkv`'s groups in four layers of Qwen3-Next's sizes: three gated delta nets and
one attention (hidden size 2048, heads 16/32 of 128 and 2/16 of 256), each with a dense MLP of 6144
in place of its experts; all but rule, convolution and attention is PyTorch's, on both sides.

Attention has 32 query and 8 key heads of size 128. `dualkv` rows are groups of responses, each with
one prompt: `long` prompts of 4096 to 32768 tokens (A to D), `short` batches (S1 to S8; the last
table has both), `responses` 1 to 64 of 512 tokens on 4096, `dense` sequences that share nothing,
and shapes that others published; `wide` has 16 query heads of size 256, and 2 or 4 key heads, as
Qwen3-Next and Qwen3.5 have. Rivals that cannot share prompts get every sequence in full, cuDNN
with padding.
`layer` is forward and backward of a whole layer of Qwen3-8B: hidden size 4096, an MLP of 12288.
Useful TFLOP/s count what is visible once, whatever is repeated. `sparse_ring` rows are one sequence
under a mask of diagonals of 64-token blocks and of single columns, which are 15 % of it; `run4` has
diagonals that come in fours. `dense` has no mask, and `index` is the choice of lines.
`torchrun --nproc-per-node N -m benchmarks.ring` times rings of N GPUs, sparse and dense;
`python -m benchmarks.ring_ranks` takes the ranks of larger rings in turn on one, without
transfers."""
