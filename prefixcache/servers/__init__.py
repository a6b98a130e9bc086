"""The cache inside servers, and the parts that the servers share. Only the commands in `cli` import these.

`mlx_lm` and `mlx_vlm` are what `prefixcache serve` runs (`cli.serve.command`); `vllm_mlx` is put into that program by its
`install`, and `mlx_engine` is imported by LM Studio's. Another server needs a name for each model (`identity`), a place where
a prompt is looked up before its prefill (`read_or_compute`), one where its state is stored, and a line in
`request_log`. What is patched in a server's program is in the `upstream` of its folder.
"""
