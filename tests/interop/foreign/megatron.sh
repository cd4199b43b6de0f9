#!/bin/bash
# A 7B model with grouped heads: 2-way tensor, 4-way pipeline, the rest data parallel.
GPUS_PER_NODE=8
NNODES=4
TP=2

MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --vocab-size 32000 --attention-dropout 0.0
)
TRAINING_ARGS="
    --micro-batch-size 1 --global-batch-size 128 --train-iters 2000 \
    --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-iters 100 --weight-decay 0.1 \
    --adam-beta2 0.95 --clip-grad 1.0 --bf16
"
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes ${NNODES:-1} --master_port 6000 pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    $TRAINING_ARGS \
    --tensor-model-parallel-size ${TP} --sequence-parallel \
    --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --recompute-granularity selective \
    --use-flash-attn --log-interval 10 --data-path part_a part_b --eval-iters 0 \
    --save-interval 500 --save out > log.txt 2>&1
