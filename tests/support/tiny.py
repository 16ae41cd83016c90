"""The settings of runs that take seconds."""

TINY = {
    "data.corpus": "documentation/installed",
    "data.vocabulary_size": 300,
    "data.inputs_length": 24,
    "model.vocab_size": 512,
    "model.num_encoder_layers": 1,
    "model.num_decoder_layers": 1,
    "model.d_model": 16,
    "model.mlp.d_ff": 32,
    "model.attention.d_kv": 8,
    "model.attention.num_heads": 2,
    "start.steps": 0,
    "pretraining.batch_size": 8,
    "pretraining.evaluate_every": 0,
    "pretraining.save_every": 2,
    "pretraining.log_every": 1,
    "finetuning.batch_size": 8,
    "tuning.inputs_length": 24,
    "tuning.evaluation_examples": 10,
    "tuning.report_examples": 24,
}
