#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64
#SBATCH --time=12:00:00 --requeue
# After a requeue the job continues from the last complete checkpoint, at most `save_steps` steps back.
# Set TARGET_NODE to the node of the target's server: the address in the recipe is localhost.
export HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 bash -c 'accelerate launch --config_file recipes/accelerate/fsdp2.yaml \
    --num_machines $SLURM_NNODES --num_processes $((8 * SLURM_NNODES)) --machine_rank $SLURM_NODEID \
    --main_process_ip $HEAD_NODE --main_process_port 29500 \
    distill/train.py --recipe legal/llama-3.1-8b-to-70b --answer_url http://$TARGET_NODE:8000 \
    --output_dir /shared/drafts/legal'
