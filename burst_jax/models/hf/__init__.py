"""Model folders as transformers writes and reads them."""
