"""The launcher half: spec -> facts -> plan -> processes. Never imports torch."""
