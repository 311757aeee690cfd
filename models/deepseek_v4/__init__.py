"""DeepSeek-V4: config, tensor table, cache layouts, contract and the float64 twin."""
