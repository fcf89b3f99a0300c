"""Everything that draws: figures, timelines, stills; one colour has one meaning."""
