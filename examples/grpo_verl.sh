#!/usr/bin/env bash
# Trains a model by GRPO of veRL on sums; the responses to a prompt share its computation.
#
#   bash examples/grpo_verl.sh                  Qwen3-4B on the 8 GPUs of a node, rollouts by vLLM
#   MODEL=FOLDER GPUS=4 bash examples/grpo_verl.sh trainer.total_epochs=2   further options of veRL
#   bash examples/grpo_verl.sh --tiny           on a CPU: writes the data and prints veRL's
#                                               configuration, and trains nothing
#
# One option makes the difference: actor_rollout_ref.model.external_lib. It works with the FSDP
# engine. The options below it keep the responses of a prompt together. The data and the reward are
# those of sums.py: replace them by yours. Needs veRL 0.9.1 with vLLM; --tiny needs no vLLM.
set -euo pipefail

here=$(CDPATH= cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
model=${MODEL:-Qwen/Qwen3-4B}
gpus=${GPUS:-8}
python=${PYTHON:-python}
prompt=2048   # tokens at most
response=1024
responses=16  # to a prompt

count=8192 data=${DATA:-out/sums} run=()
if [ "${1-}" = --tiny ]; then
  shift
  count=64 data=${DATA:-out/sums-tiny} run=(--cfg job)
fi
"$python" -c "import verl" 2>/dev/null || {
  echo "veRL is not installed; need verl 0.9.1; pip install verl==0.9.1" >&2
  exit 1
}
"$python" "$here/sums.py" "$data" --count "$count"
data=$(cd "$data" && pwd)

# of a group: the prompt once, and its responses
group=$((prompt + responses * response))
options=(
  algorithm.adv_estimator=grpo
  algorithm.use_kl_in_reward=False
  data.train_files="$data/train.parquet"
  data.val_files="$data/test.parquet"
  data.train_batch_size=64
  data.max_prompt_length=$prompt
  data.max_response_length=$response
  data.truncation=error
  reward.custom_reward_function.path="$here/sums.py"
  reward.custom_reward_function.name=compute_score

  actor_rollout_ref.model.path="$model"
  actor_rollout_ref.model.external_lib=qla_kernels.integrations.verl_patch
  actor_rollout_ref.model.enable_gradient_checkpointing=True

  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$group
  actor_rollout_ref.actor.ppo_mini_batch_size=64
  actor_rollout_ref.actor.shuffle=False
  actor_rollout_ref.actor.use_prefix_grouper=False
  actor_rollout_ref.actor.ulysses_sequence_parallel_size=1
  actor_rollout_ref.actor.use_kl_loss=True
  actor_rollout_ref.actor.kl_loss_coef=0.001
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.ref.fsdp_config.param_offload=True

  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=$responses
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5

  trainer.n_gpus_per_node="$gpus"
  trainer.nnodes=1
  trainer.total_epochs=1
  trainer.save_freq=50
  trainer.test_freq=10
  trainer.val_before_train=False
  trainer.logger='["console"]'
  trainer.project_name=sums
  trainer.experiment_name=grpo
)
exec "$python" -m verl.trainer.main_ppo "${options[@]}" "$@" ${run[@]+"${run[@]}"}
