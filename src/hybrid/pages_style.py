"""The stylesheet of all HTML pages: light and dark, phone and wide screen, and paper."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --rule: #d9dee3;
  --page: #ffffff; --panel: #f5f7f9; --good: #1a7f37; --mid: #8a5a00; --bad: #c62828;
  --blue: #1f6feb; --orange: #b35900; --green: #2a7f4f; --purple: #6f42c1; --teal: #0f8b8d;
  --grey: #8a929b; --yellow: #c2a300; --pink: #d16ba5; --red: #c0392b; --slate: #4f6272;
  --pale: #c4cad0; --shade: #0002; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaee; --soft: #9aa5b1; --rule: #343b43;
  --page: #12161b; --panel: #1b2128; --good: #4fbf82; --mid: #e3b341; --bad: #ff7b72;
  --blue: #6cb0ff; --orange: #f0a35e; --green: #4fbf82; --purple: #b392f0; --teal: #4fc3c5;
  --grey: #8d97a1; --yellow: #e3c94a; --pink: #ec9cc6; --red: #ff7b72; --slate: #8fa5b8;
  --pale: #4a525b; --shade: #fff3; } }
* { box-sizing: border-box }
html { text-size-adjust: 100%; -webkit-text-size-adjust: 100% }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere }
main { margin: 0 auto; max-width: 64rem; padding: 1.25rem 1rem 3rem }
h1 { font-size: 1.4rem; line-height: 1.3; margin: 0 0 .5rem }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem } h3 { font-size: 1rem; margin: 1.5rem 0 .25rem }
p, ul { margin: .5rem 0 } ul { padding-left: 1.25rem }
small, .soft, .note, figcaption small { color: var(--soft); font-weight: 400 }
small { font-size: .87em }
code { font: .92em ui-monospace, monospace; background: var(--panel); padding: .05em .25em;
  border-radius: 3px }
.note { font-size: .85rem } .good { color: var(--good) } .mid { color: var(--mid) }
.bad { color: var(--bad) }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 10rem), 1fr));
  gap: .75rem; margin: 1rem 0 }
dl div { background: var(--panel); border-radius: 6px; padding: .6rem .8rem }
dt { color: var(--soft); font-size: .85rem } dd { margin: 0; font-size: 1.15rem }
dd small { display: block; font-size: .8rem }
.wide { overflow-x: auto; margin: .75rem 0; /* a shadow at the side where there is more */
  background: linear-gradient(90deg, var(--page) 1rem, transparent 2rem) local,
    linear-gradient(270deg, var(--page) 1rem, transparent 2rem) local,
    linear-gradient(90deg, var(--shade), transparent .8rem),
    linear-gradient(270deg, var(--shade), transparent .8rem) }
table { border-collapse: collapse; min-width: 100%; font-size: 14px }
caption { text-align: left; font-weight: 600; padding: .3rem .6rem }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem;
  border-bottom: 1px solid var(--rule); overflow-wrap: break-word }
th { color: var(--soft); font-weight: 500; vertical-align: bottom }
th.n, td.n { text-align: right; font-variant-numeric: tabular-nums }
td { white-space: nowrap }
td.long { min-width: 13rem; max-width: 36rem; overflow-wrap: anywhere; white-space: normal }
i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em }
.key { margin: .25rem 0 } .key span { margin-right: 1rem; white-space: nowrap }
summary { cursor: pointer } details { margin: .75rem 0 }
pre { white-space: pre-wrap; background: var(--panel); border-radius: 6px; padding: 1rem;
  font-size: 13px }
figure { margin: 1.25rem 0; min-width: 0 } figcaption { font-weight: 600 }
.gallery { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr));
  gap: 0 1.5rem }
svg { display: block; overflow: visible }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif }
svg.plot { background: var(--panel); margin: .75rem 1rem 2.4rem 4.25rem;
  width: calc(100% - 5.25rem) }
svg.plot.rows { margin-left: 0; width: calc(100% - 1rem) }
svg.bar { width: 100%; height: 1.75rem; margin: .4rem 0 }
svg .grid { stroke: var(--rule) } svg .curve { fill: none; stroke-width: 2;
  stroke-linejoin: round; vector-effect: non-scaling-stroke }
svg .dot { stroke: var(--page); stroke-width: 1.5 } svg .cursor { stroke: var(--soft) }
.reading { min-height: 1.5em; margin: 0; color: var(--soft); font-size: .85rem;
  font-variant-numeric: tabular-nums }
@media (max-width: 600px) { table { font-size: 13px } th, td, caption { padding: .3rem .4rem } }
@media print { .wide { overflow: visible } section, figure { break-inside: avoid-page } }
"""
