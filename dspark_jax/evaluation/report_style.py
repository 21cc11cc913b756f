"""How a report looks, in light and in dark."""

# The same hues, lifted until they reach a contrast of 4.5 on the dark background.
DARK_COLOURS = ("#58B4F5", "#FF8A4C", "#35C79A", "#E79AC8", "#F0B429", "#A5DBFF", "#F2F2F2")

STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --quiet: #5b5b60; --line: #d9d9de;
  --paper: #ffffff; --panel: #f6f6f8; --link: #0058a3; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf0; --quiet: #a9a9b2; --line: #3a3a40;
  --paper: #17171a; --panel: #202024; --link: #7cc0ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
.skip { position: absolute; left: -999px; }
.skip:focus { left: 1rem; top: 1rem; background: var(--paper); }
header, main, footer { max-width: 72rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2rem; }
footer { padding: 2rem 1.25rem 3rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.3rem; margin: 0 0 .5rem; }
section { padding: 2rem 0 0; }
p { max-width: 46rem; margin: .25rem 0 1rem; }
.quiet { color: var(--quiet); font-size: .9rem; }
a { color: var(--link); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
nav ul { list-style: none; padding: 0; margin: 1rem 0 0; display: flex; flex-wrap: wrap;
  gap: .35rem 1.25rem; }
.charts { display: grid; gap: 1.25rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0; padding: 1rem; background: var(--panel); border-radius: .6rem; min-width: 0;
  max-width: 40rem; }
figcaption { font-weight: 600; margin-bottom: .5rem; }
figure > svg { width: 100%; height: auto; display: block; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0;
  margin: .5rem 0 0; font-size: .875rem; }
.legend li { display: flex; align-items: center; gap: .4rem; }
.swatch { width: 34px; height: 16px; flex: none; }
text { fill: var(--ink); font: 14px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
text.label { fill: var(--quiet); }
.grid { stroke: var(--line); }
.axis { stroke: var(--quiet); }
.diagonal { stroke: var(--quiet); stroke-dasharray: 4 4; }
.mark { fill: none; stroke: var(--colour); stroke-width: 2; }
.whisker { stroke: var(--colour); stroke-width: 1.6; }
.dot { fill: var(--colour); stroke: var(--colour); stroke-width: 1.4; }
.dot.hollow { fill: var(--panel); }
details { margin-top: .6rem; font-size: .9rem; }
summary { cursor: pointer; color: var(--link); }
.scroll { overflow-x: auto; margin: 0 0 1.25rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--quiet); padding-bottom: .4rem; }
th, td { padding: .3rem .75rem .3rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
thead th { font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 400; }
@media print { figure { break-inside: avoid; } details { display: none; } }
"""
