"""Sources of text beside plain files: tables, the Hub, tokens made elsewhere."""
