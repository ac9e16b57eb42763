.PHONY: demo test lint types bench
demo test lint types bench:
	@sh ./x $@
