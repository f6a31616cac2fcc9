"""One small file of facts for each way in which a cluster starts processes."""
