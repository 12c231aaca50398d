"""The look of the report: one style sheet, light and dark, from a telephone to a wide screen.

All rules are below `.raytf`, so that a notebook around it keeps its own look.
"""

from __future__ import annotations

__all__ = ["CATEGORY_COLORS", "CSS"]

# Of the ledger, (light, dark): what trains is calm, what faults cost is warm, waiting is grey.
CATEGORY_COLORS = {
    "step": ("#2f7d5b", "#4fb286"),
    "validate": ("#7fae5c", "#9ccc78"),
    "start": ("#5b7fb5", "#7fa3dc"),
    "compile": ("#8a78b8", "#ab99dd"),
    "data_wait": ("#4aa3b5", "#62c2d4"),
    "save_stall": ("#c9a227", "#e3c04e"),
    "detect": ("#e08a3c", "#f0a35c"),
    "restart": ("#c8503c", "#e8745f"),
    "replay": ("#a8456f", "#d06c96"),
    "idle": ("#a9adb3", "#666c75"),
}

_LIGHT = """
  --page:#ffffff; --card:#f6f7f9; --edge:#dfe2e7; --text:#1d2129; --soft:#5a6270;
  --train:#2f6fb5; --val:#c2571a; --grid:#e3e6ea; --bad:#b3261e; --warn:#8a5a00; --good:#1f7a4d;
  --bar:#b9cbe2; --code:#eef0f3;"""
_DARK = """
  --page:#14171c; --card:#1c2027; --edge:#323843; --text:#e5e8ec; --soft:#9aa3b0;
  --train:#6fa8e8; --val:#f09a5f; --grid:#2b313b; --bad:#ff8a80; --warn:#e8bd62; --good:#6fcf97;
  --bar:#3b5574; --code:#232831;"""


def _colors(index: int) -> str:
    return "".join(f"--c-{name}:{pair[index]};" for name, pair in CATEGORY_COLORS.items())


CSS = (
    f".raytf{{color-scheme:light dark;{_LIGHT}{_colors(0)}}}"
    f"@media (prefers-color-scheme:dark){{.raytf{{{_DARK}{_colors(1)}}}}}"
    """
.raytf{background:var(--page);color:var(--text);font:15px/1.5 system-ui,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;padding:24px clamp(12px,3vw,40px);box-sizing:border-box;
overflow-wrap:anywhere}
.raytf *{box-sizing:border-box}
.raytf main{max-width:1320px;margin:0 auto}
.raytf h1{font-size:1.6rem;line-height:1.2;margin:0 0 4px}
.raytf h2{font-size:1.1rem;margin:36px 0 12px}
.raytf p{margin:4px 0}
.raytf .soft{color:var(--soft)}
.raytf .state{display:inline-block;font-size:.8rem;font-weight:600;letter-spacing:.03em;
padding:2px 10px;border-radius:99px;border:1px solid currentColor;vertical-align:middle;
margin-left:8px;color:var(--soft)}
.raytf .FINISHED,.raytf .RUNNING{color:var(--good)}
.raytf .ERRORED,.raytf .ABORTED{color:var(--bad)}
.raytf .RESTARTING,.raytf .UNKNOWN,.raytf .INITIALIZING{color:var(--warn)}
.raytf .tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(155px,1fr));gap:10px;
margin:20px 0 0;padding:0}
.raytf .tiles div,.raytf .chart,.raytf .fault{background:var(--card);border:1px solid var(--edge);
border-radius:8px;padding:10px 14px}
.raytf .tiles dt{color:var(--soft);font-size:.8rem}
.raytf .tiles dd{margin:0;font-size:1.1rem;font-weight:600;font-variant-numeric:tabular-nums}
.raytf .stack{display:flex;height:30px;border-radius:6px;overflow:hidden;gap:1px;
background:var(--page)}
.raytf .stack i{min-width:2px}
.raytf .legend{display:grid;grid-template-columns:repeat(auto-fill,minmax(270px,1fr));
gap:2px 32px;list-style:none;margin:12px 0 0;padding:0;font-variant-numeric:tabular-nums}
.raytf .legend li{display:flex;align-items:center;gap:8px;margin:0}
.raytf .legend i{width:12px;height:12px;border-radius:3px;flex:none}
.raytf .legend span{flex:1}
.raytf .legend small{color:var(--soft);min-width:4.2em;text-align:right;font-size:.85rem}
.raytf .charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,370px),1fr));
gap:14px}
.raytf figure{margin:0}
.raytf figcaption{display:flex;flex-wrap:wrap;justify-content:space-between;gap:2px 12px;
font-weight:600;margin-bottom:8px}
.raytf .keys{display:flex;flex-wrap:wrap;gap:0 14px;font-weight:400;font-size:.85rem}
.raytf .key::before{content:"";display:inline-block;width:14px;height:3px;border-radius:2px;
background:currentColor;margin-right:5px;vertical-align:middle}
.raytf .key.train{color:var(--train)}
.raytf .key.val{color:var(--val)}
.raytf .plot{display:grid;grid-template-columns:52px 1fr;height:190px}
.raytf .plot svg{width:100%;height:100%;overflow:visible;display:block}
.raytf .ys{position:relative;font-size:.75rem;color:var(--soft);font-variant-numeric:tabular-nums}
.raytf .ys span{position:absolute;right:8px;transform:translateY(-50%);white-space:nowrap}
.raytf .xs{display:flex;justify-content:space-between;margin:6px 0 0 52px;font-size:.75rem;
color:var(--soft)}
.raytf svg path,.raytf svg line{vector-effect:non-scaling-stroke;fill:none}
.raytf .grid{stroke:var(--grid)}
.raytf .restart{stroke:var(--soft);stroke-dasharray:4 3;stroke-width:1.3}
.raytf .line{stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.raytf .line.train{stroke:var(--train)}
.raytf .line.dots{stroke-width:6}
.raytf .line.val{stroke:var(--val)}
.raytf .lane{display:grid;grid-template-columns:76px 1fr;align-items:center;margin:5px 0}
.raytf .lane>span{color:var(--soft);font-size:.85rem}
.raytf .lane>div{position:relative;height:24px;background:var(--card);border-radius:4px}
.raytf .lane i{position:absolute;top:0;bottom:0;font-style:normal}
.raytf .bar{background:var(--bar);border-radius:4px;overflow:hidden}
.raytf .bar.open{border-right:3px solid var(--bad)}
.raytf .bar b{font-size:.75rem;padding-left:6px;line-height:24px;font-weight:600}
.raytf .out{background:var(--c-restart);opacity:.45;border-radius:4px}
.raytf .mark{width:12px;height:12px;margin:6px 0 0 -6px;border-radius:50%;background:var(--bad)}
.raytf .mark.soft{background:var(--warn)}
.raytf .save{width:2px;margin-left:-1px;background:var(--good)}
.raytf .scale>div{display:flex;justify-content:space-between;height:auto;background:none;
color:var(--soft);font-size:.75rem}
.raytf .fault{margin:10px 0}
.raytf .fault.stopped{border-left:4px solid var(--bad)}
.raytf .fault.soft{border-left:4px solid var(--warn);color:inherit}
.raytf .fault header{display:flex;flex-wrap:wrap;justify-content:space-between;gap:2px 16px}
.raytf .fault dl{display:grid;grid-template-columns:minmax(76px,max-content) 1fr;gap:2px 14px;
margin:8px 0 0}
.raytf .fault dt{color:var(--soft)}
.raytf .fault dd{margin:0}
.raytf details{margin-top:8px}
.raytf summary{cursor:pointer;color:var(--train)}
.raytf pre{background:var(--code);border-radius:6px;padding:10px 12px;margin:8px 0 0;
font:12.5px/1.45 ui-monospace,Menlo,Consolas,monospace;overflow:auto;max-height:420px;
white-space:pre;overflow-wrap:normal;color:inherit}
.raytf table{border-collapse:collapse;width:100%;font-size:.9rem;color:inherit}
.raytf th{text-align:left;font-weight:400;color:var(--soft);width:42%;vertical-align:top}
.raytf th,.raytf td{padding:5px 10px 5px 0;border-bottom:1px solid var(--edge);
background:none}
.raytf .two{display:grid;align-items:start;
grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));
gap:0 40px}
.raytf footer{margin-top:36px;color:var(--soft);font-size:.8rem}
@media print{.raytf details>pre{max-height:none}}
"""
)
