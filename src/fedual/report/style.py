"""The looks of a report: one style sheet for light and dark, wide and narrow, screen and paper."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #5b6473; --faint: #9aa3b2; --edge: #dfe3ea; --paper: #fff;
  --card: #f5f7fa; --good: #1d7f4e; --note: #9a6700; --bad: #c0322b; --link: #1f5fa8;
  --c0: #2066a8; --c1: #d97a00; --c2: #2e8b57; --c3: #c0392b; --c4: #7d4f9e; --c5: #8c6d46; --c6: #d45a9b;
  --c7: #7a8392; --c8: #a5a51f; --c9: #1a9fb0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ef; --soft: #a3adbd; --faint: #6d7787; --edge: #323947;
  --paper: #14181f; --card: #1d232d; --good: #4cc38a; --note: #e2b340; --bad: #ff7b72; --link: #79b8ff;
  --c0: #5aa2e6; --c1: #f0a03c; --c2: #57c48a; --c3: #f0766a; --c4: #b58ad6; --c5: #c4a070; --c6: #f08cc0;
  --c7: #97a1b2; --c8: #d0d05a; --c9: #4fc9d9; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0.5rem 0 0.25rem; }
h2 { font-size: 1.2rem; margin: 1.75rem 0 0.6rem; padding-top: 1rem; border-top: 1px solid var(--edge); }
h3 { font-size: 1.05rem; margin: 1.75rem 0 0.5rem; }
p { margin: 0.5rem 0; max-width: 46rem; }
.lead, .aside, caption { color: var(--soft); }
.aside { max-width: 24rem; align-self: center; font-size: 0.9rem; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1.25rem; margin: 1rem 0;
  font-size: 0.95rem; }
dt { color: var(--soft); } dd { margin: 0; }
.verdict { list-style: none; margin: 0; padding: 0; display: grid; gap: 0.5rem; }
.verdict li { padding: 0.6rem 0.9rem; background: var(--card); border-left: 4px solid var(--tone); border-radius: 4px; }
.verdict strong { color: var(--tone); }
.good { --tone: var(--good); } .note { --tone: var(--note); } .bad { --tone: var(--bad); }
.tone { color: var(--tone); font-weight: 600; }
.verdict .good strong::before { content: "✓ "; } .verdict .bad strong::before { content: "✗ "; }
.headline table { font-size: clamp(1.05rem, 4.2vw, 1.5rem); }
.headline td, .headline th { padding: 0.3rem 0.8rem; }
.headline thead th, .headline tbody th { font-size: 0.9rem; }
.scroll { margin: 0.5rem 0; overflow: auto; max-height: 26rem; max-width: max-content; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
caption { text-align: left; font-size: 0.85rem; padding-bottom: 0.25rem; }
th, td { padding: 0.3rem 0.55rem; text-align: right; border-bottom: 1px solid var(--edge); white-space: nowrap; }
th { font-weight: 600; } thead th { color: var(--soft); }
tbody th, thead th:first-child { text-align: left; }
.verdict + details tr :last-child { white-space: normal; text-align: left; min-width: 14rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 18.5rem), 1fr)); gap: 1rem 1.25rem; }
.chart { margin: 0; max-width: 27rem; } .chart svg { display: block; width: 100%; height: auto; }
figcaption { font-weight: 600; font-size: 0.95rem; }
svg text { fill: var(--soft); font-size: 11px; } svg .label { font-size: 11.5px; }
.grid { stroke: var(--edge); fill: none; } .tick { stroke: var(--faint); fill: none; }
.line { stroke: var(--c); stroke-width: 1.9; fill: none; stroke-linejoin: round; }
.bar, circle { fill: var(--c); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0.25rem 1.1rem; margin: 0.5rem 0; padding: 0;
  font-size: 0.9rem; }
.legend li { display: inline-flex; align-items: center; gap: 0.4rem; }
.legend i { width: 0.8rem; height: 0.8rem; border-radius: 2px; background: var(--c); }
.swatch { width: 28px; height: 12px; flex: none; }
input[name=over] { position: absolute; opacity: 0; }
input[name=over] + label { display: inline-block; padding: 0.15rem 0.8rem; margin: 0.25rem 0.4rem 0.9rem 0;
  border: 1px solid var(--edge); border-radius: 1rem; font-size: 0.9rem; cursor: pointer; }
input[name=over]:checked + label { background: var(--ink); color: var(--paper); border-color: var(--ink); }
input[name=over]:focus-visible + label, summary:focus-visible, .scroll:focus-visible, pre:focus-visible {
  outline: 3px solid var(--link); outline-offset: 2px; }
#over-rounds:checked ~ .by-bytes, #over-bytes:checked ~ .by-rounds { display: none; }
details { margin: 0.75rem 0; } summary { cursor: pointer; color: var(--link); width: max-content; max-width: 100%; }
.run { border: 1px solid var(--edge); border-radius: 6px; padding: 0.25rem 1rem; }
.run > summary { font-weight: 600; padding: 0.4rem 0; }
pre { background: var(--card); padding: 0.75rem; overflow: auto; max-height: 26rem; font-size: 0.8rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr)); gap: 0.75rem;
  margin: 0.75rem 0; }
.card { margin: 0; padding: 0.4rem; background: var(--card); border: 2px solid transparent; border-radius: 6px; }
.card.wrong { border-color: var(--bad); }
.card img { display: block; width: 100%; image-rendering: pixelated; border-radius: 3px; }
.card figcaption { display: grid; font-weight: 400; font-size: 0.8rem; line-height: 1.35; padding-top: 0.3rem; }
.card .class { font-weight: 600; font-size: 0.95rem; } .wrong .class { color: var(--bad); }
footer { margin-top: 3rem; color: var(--soft); font-size: 0.85rem; }
@media (max-width: 30rem) { body { padding: 0.75rem 0.9rem 3rem; } .facts { column-gap: 0.8rem; }
  .headline td, .headline th { padding: 0.3rem 0.35rem; white-space: normal; } }
"""
