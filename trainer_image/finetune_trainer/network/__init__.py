"""What every role with a way out of the cluster does alike: retries, waiting as servers ask, going online."""
