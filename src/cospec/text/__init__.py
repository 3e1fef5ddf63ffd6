"""Text in and out: inputs, chat templates, tokenizer, detokenizer."""
