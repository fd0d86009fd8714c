def text(lines): return ""
