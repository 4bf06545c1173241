"""Words of a command line that make a run of seconds."""

MODEL = ["model.n_layers=1", "model.d_model=32", "model.n_heads=2", "model.d_ff=48", "model.rope_theta=50"]
RUN = [
    *("experiment=none", "data=text", "data.seq_len=32", "data.batch_size=4", "trainer=cpu", "trainer.max_steps=12"),
    *("trainer.enable_progress_bar=false", "trainer.log_every_n_steps=1", "checkpoint.every=4", "prompts=[]"),
    *("validation.every=0", "validation.batches=null", "threads=1"),
]
