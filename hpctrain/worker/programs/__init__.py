"""The rank programs that the commands start besides a training, such as those of doctor and data shard."""
