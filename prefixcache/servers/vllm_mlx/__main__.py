"""vllm-mlx's own command, with a PrefixCache installed."""

from prefixcache.servers.vllm_mlx.installation import main

if __name__ == "__main__":
    main()
