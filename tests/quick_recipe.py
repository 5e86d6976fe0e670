"""A stack that learns to reverse short words in about a minute on two cores."""

GAIN = 0.15
"""What its mean reward rises by at least, from its first three RL steps to its last three."""
WARMUP, RL = 160, 20
"""Steps of the stages."""
STACK = """\
name: quick
num_nodes: 1
workdir: .
envs: {STACK: quick.yaml}
run: stackrl node "$STACK"

_metadata:
  stack:
    version: 1
    model:
      init: random
      architecture: qwen3
      tokenizer: bytes
      dtype: float32
      config:
        hidden_size: 128
        intermediate_size: 384
        num_hidden_layers: 2
        num_attention_heads: 4
        num_key_value_heads: 2
        head_dim: 32
        tie_word_embeddings: false
        initializer_range: 0.02
    roles: {trainer: {processes: 1}, inference: {processes: 1}}
    trainer: {sequence_length: 512}
    inference: {max_model_length: 512}
    environments:
      - {name: reverse, type: reverse_text, args: {letters: [3, 6]}}
    sampling: {temperature: 1.0, max_tokens: 9}
    algorithm:
      advantage: {type: grpo}
      loss: {type: aipo, ratio_cap: 2.0}
      group_size: 8
      batch_size: 128
      max_staleness: 1
    stages:
      - name: warmup
        type: supervised
        steps: 160
        batch_size: 64
        noise: 0.6
        clean_steps: 120
        optimizer: {learning_rate: 3.0e-3, betas: [0.9, 0.95], weight_decay: 0.01, warmup_steps: 20}
      - name: main
        type: rl
        steps: 20
        optimizer: {learning_rate: 5.0e-4, betas: [0.9, 0.99], max_gradient_norm: 1.0, warmup_steps: 5}
    checkpoint: {every: 90, keep: 2}
"""
