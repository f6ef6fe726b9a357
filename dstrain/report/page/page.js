"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const several = data.runs.length > 1;
  const LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 22, HEIGHT = 214;
  const AXES = { step: "step", epoch: "epoch", hours: "hours" };

  // The state is in the address, so that a reload and a copied link keep it.
  const state = { x: "step", smooth: 0, trim: false, events: true, log: {}, off: {}, zoom: null, live: true };
  const words = new URLSearchParams(location.hash.slice(1));
  if (Object.hasOwn(AXES, words.get("x") || "")) state.x = words.get("x");
  state.smooth = Math.min(0.99, Math.max(0, Number(words.get("smooth")) || 0));
  state.trim = words.get("trim") === "1";
  state.events = words.get("events") !== "0";
  state.live = words.get("live") !== "0";
  for (const id of (words.get("log") || "").split(",")) if (id) state.log[id.replace("!", "")] = !id.startsWith("!");
  for (const key of (words.get("off") || "").split(",")) if (key) state.off[key] = true;
  const range = (words.get("zoom") || "").split(",").map(Number);
  if (range.length === 2 && range[1] > range[0]) state.zoom = range;

  function remember() {
    const found = new URLSearchParams();
    if (state.x !== "step") found.set("x", state.x);
    if (state.smooth) found.set("smooth", state.smooth);
    if (state.trim) found.set("trim", "1");
    if (!state.events) found.set("events", "0");
    if (!state.live) found.set("live", "0");
    const log = Object.entries(state.log).map(([id, on]) => (on ? id : "!" + id));
    if (log.length) found.set("log", log.join(","));
    const off = Object.keys(state.off).filter((key) => state.off[key]);
    if (off.length) found.set("off", off.join(","));
    if (state.zoom) found.set("zoom", state.zoom.join(","));
    try { history.replaceState(null, "", "#" + found.toString()); } catch { /* a frame without an address */ }
  }

  function make(parent, tag, attributes, text) {
    const svg = parent instanceof SVGElement || tag === "svg";
    const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  function format(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6) return value.toExponential(2).replace(/\.?0+e\+/, "e").replace("e+", "e");
    if (size >= 1e4) return Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
    if (size < 1e-4) return value.toExponential(2).replace(/\.?0+e-/, "e-").replace("e-", "e−");
    return String(Number(value.toPrecision(4)));
  }

  function interpolate(xs, ys, x) {
    let low = 0, high = xs.length - 1;
    if (high < 0) return x;
    if (x <= xs[0]) return xs[0] > 0 ? ys[0] * (state.x === "hours" ? 1 : x / xs[0]) : ys[0];
    if (x >= xs[high]) return ys[high];
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= x) low = middle; else high = middle; }
    const width = xs[high] - xs[low];
    return width > 0 ? ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / width : ys[high];
  }

  function place(run, step) {
    return state.x === "step" ? step : interpolate(data.runs[run].axes.step, data.runs[run].axes[state.x], step);
  }

  function smoothed(values) {
    // Exponential mean, divided by the weight so far: without it the curve would begin at zero.
    const found = []; let mean = 0, weight = 0;
    for (const value of values) {
      mean = state.smooth * mean + (1 - state.smooth) * value;
      weight = state.smooth * weight + (1 - state.smooth);
      found.push(mean / weight);
    }
    return found;
  }

  function linearTicks(low, high, count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.75) || power;
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9 && found.length < 50; k++) found.push(Number((k * step).toPrecision(12)));
    return found;
  }

  function logTicks(low, high) {
    const found = [], first = Math.floor(low), last = Math.ceil(high), every = Math.max(1, Math.ceil((last - first) / 5));
    for (let k = first; k <= last; k += every) for (const one of high - low < 2 ? [1, 2, 5] : [1]) {
      const at = k + Math.log10(one);
      if (at >= low - 1e-9 && at <= high + 1e-9) found.push(at);
    }
    return found.length > 1 ? found : [low, high];
  }

  function color(one) { return "k" + ((several ? one.run : one.slot) % 8); }
  function keyOf(chart, one) { return several ? chart.id + "." + one.run + "." + one.slot : chart.id + "." + one.slot; }
  function isOff(chart, one) { return state.off[keyOf(chart, one)] || (several && state.off["run" + one.run]); }

  class View {
    constructor(chart, parent) {
      this.chart = chart;
      this.figure = make(parent, "figure", { class: "chart", id: "chart-" + chart.id });
      const caption = make(this.figure, "figcaption");
      const title = make(caption, "span");
      make(title, "b", {}, chart.title + (chart.unit ? ", " + chart.unit : ""));
      make(title, "span", { class: "soft small", title: chart.about }, "  " + chart.about);
      this.logButton = make(caption, "button", { class: "log", type: "button", title: "logarithmic scale" }, "log");
      this.logButton.onclick = () => { state.log[chart.id] = !this.isLog(); update(); };
      this.legend = make(this.figure, "div", { class: "legend" });
      this.plot = make(this.figure, "div", { class: "plot" });
      this.svg = make(this.plot, "svg", { role: "img", "aria-label": chart.title, height: HEIGHT });
      this.tip = make(this.plot, "div", { class: "tip", hidden: "" });
      this.plot.addEventListener("pointermove", (event) => this.hover(event));
      this.plot.addEventListener("pointerleave", () => this.leave());
      this.plot.addEventListener("pointerdown", (event) => this.press(event));
      this.plot.addEventListener("pointerup", (event) => this.release(event));
      this.plot.addEventListener("dblclick", () => { state.zoom = null; update(); });
      for (const one of chart.series) {
        const button = make(this.legend, "button", { type: "button", "data-key": keyOf(chart, one) });
        make(button, "span", { class: `swatch ${color(one)} ${one.split}${several && one.slot && one.split === "train" ? " dashed" : ""}` });
        button.appendChild(document.createTextNode(this.nameOf(one)));
        button.onclick = () => { const key = keyOf(chart, one); state.off[key] = !state.off[key]; update(); };
      }
    }

    nameOf(one) {
      if (!several) return one.label;
      const run = data.runs[one.run].name;
      return this.chart.series.every((other) => other.label === one.label) ? run : `${run} · ${one.label}`;
    }

    isLog() { return state.log[this.chart.id] ?? this.chart.log; }

    prepare() {
      const log = this.isLog();
      this.curves = this.chart.series.filter((one) => !isOff(this.chart, one)).map((one) => {
        const read = (xs, ys) => xs.map((step, k) => ({ step, x: place(one.run, step), y: ys[k] })).filter((point) => !log || point.y > 0);
        // Of a curve with many rows `x` and `y` are the extremes of each bucket: they are drawn as a band behind the means.
        const band = one.mean_x && !this.chart.dots ? read(one.x, one.y) : null;
        const points = band ? read(one.mean_x, one.mean_y) : read(one.x, one.y);
        const smooth = state.smooth && one.split === "train" && !this.chart.dots && this.chart.id !== "lr" ? smoothed(points.map((point) => point.y)) : null;
        return { ...one, points, band, smooth };
      });
      const inside = (x) => !state.zoom || (x >= state.zoom[0] && x <= state.zoom[1]);
      const xs = this.curves.flatMap((one) => one.points.map((point) => point.x));
      let ys = this.curves.flatMap((one) => (one.band || one.points).filter((point) => inside(point.x)).map((point) => point.y));
      if (state.trim && ys.length > 20) {
        ys = ys.sort((a, b) => a - b);
        ys = ys.slice(Math.floor(ys.length * 0.02), Math.ceil(ys.length * 0.98));
      }
      const value = (y) => (log ? Math.log10(y) : y);
      let low = Infinity, high = -Infinity;
      for (const y of ys) { low = Math.min(low, value(y)); high = Math.max(high, value(y)); }
      for (const line of this.chart.lines) if (!log || line.y > 0) {
        // A line far from the values would press them flat: it is left out of the scale then.
        const at = value(line.y);
        if (this.chart.zero || (at > low - 0.5 * (high - low) && at < high + 0.5 * (high - low))) { low = Math.min(low, at); high = Math.max(high, at); }
      }
      if (!(high >= low)) { low = 0; high = 1; }
      if (this.chart.zero && !log) low = Math.min(0, low);
      const pad = high > low ? 0.05 * (high - low) : Math.abs(high) * 0.05 || 0.5;
      this.low = this.chart.zero && !log && low === 0 ? 0 : low - pad;
      this.high = high + pad;
      let left = Infinity, right = -Infinity;
      for (const x of xs) { left = Math.min(left, x); right = Math.max(right, x); }
      if (state.zoom) [left, right] = state.zoom;
      if (!(right > left)) { right = Number.isFinite(left) ? left + 1 : 1; left = Number.isFinite(left) ? left - 1 : 0; }
      this.left = left; this.right = right; this.value = value;
    }

    toX(x) { return LEFT + ((x - this.left) / (this.right - this.left)) * (this.width - LEFT - RIGHT); }
    toY(y) { return TOP + (1 - (this.value(y) - this.low) / (this.high - this.low)) * (HEIGHT - TOP - BOTTOM); }
    fromX(pixel) { return this.left + ((pixel - LEFT) / (this.width - LEFT - RIGHT)) * (this.right - this.left); }

    draw() {
      this.width = Math.max(200, this.plot.clientWidth);
      this.prepare();
      this.logButton.setAttribute("aria-pressed", String(this.isLog()));
      for (const button of this.legend.children) {
        const one = this.chart.series.find((item) => keyOf(this.chart, item) === button.dataset.key);
        button.setAttribute("aria-pressed", String(!isOff(this.chart, one)));
      }
      this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
      this.svg.replaceChildren();
      this.drawAxes();
      const id = "clip-" + this.chart.id;
      const clip = make(make(this.svg, "defs"), "clipPath", { id });
      make(clip, "rect", { x: LEFT, y: TOP - 2, width: Math.max(1, this.width - LEFT - RIGHT), height: HEIGHT - TOP - BOTTOM + 4 });
      const area = make(this.svg, "g", { "clip-path": `url(#${id})` });
      this.drawMarks(area);
      this.drawCurves(area);
      this.cross = make(this.svg, "line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
      this.box = make(this.svg, "rect", { class: "zoom", y: TOP, height: HEIGHT - TOP - BOTTOM, visibility: "hidden" });
    }

    drawAxes() {
      const ticks = this.isLog() ? logTicks(this.low, this.high) : linearTicks(this.low, this.high, 5);
      for (const at of ticks) {
        const y = TOP + (1 - (at - this.low) / (this.high - this.low)) * (HEIGHT - TOP - BOTTOM);
        make(this.svg, "line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y });
        make(this.svg, "text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, format(this.isLog() ? Number((10 ** at).toPrecision(3)) : at));
      }
      for (const at of linearTicks(this.left, this.right, Math.max(3, Math.floor(this.width / 75)))) {
        const x = this.toX(at), anchor = x > this.width - RIGHT - 14 ? "end" : "middle";
        make(this.svg, "text", { x: anchor === "end" ? this.width - RIGHT : x, y: HEIGHT - 6, "text-anchor": anchor }, format(at));
      }
      make(this.svg, "line", { class: "axis", x1: LEFT, x2: this.width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM });
    }

    drawMarks(area) {
      this.marks = [];
      let last = -Infinity;
      if (!state.events) return;
      for (const mark of data.marks) {
        if (several && state.off["run" + mark.run]) continue;
        const x = this.toX(place(mark.run, mark.step));
        if (!(x >= LEFT - 1 && x <= this.width - RIGHT + 1)) continue;
        this.marks.push({ ...mark, at: x });
        if (mark.kind === "save") {
          if (!(x - last < 7)) { last = x; make(area, "path", { class: "save", d: `M${x - 3.5} ${HEIGHT - BOTTOM}h7l-3.5 -6z` }); }
        } else if (mark.kind === "skip") make(area, "line", { class: "mark skip", x1: x, x2: x, y1: TOP, y2: TOP + 9 });
        else make(area, "line", { class: "mark " + mark.kind, x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM });
      }
    }

    drawCurves(area) {
      const shared = this.chart.lines.every((line) => line.y === this.chart.lines[0].y);
      for (const line of shared ? this.chart.lines.slice(0, 1) : this.chart.lines) {
        if ((several && !shared && state.off["run" + line.run]) || (this.isLog() && line.y <= 0)) continue;
        const y = this.toY(line.y);
        if (y < TOP - 1 || y > HEIGHT - BOTTOM + 1) continue;
        make(area, "line", { class: "reference " + (several && !shared ? "k" + (line.run % 8) : "k6"), x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y });
        const at = LEFT + 6 + (shared ? 0 : 92 * (line.run % 3));
        make(area, "text", { x: at, y: y < TOP + 16 ? y + 13 : y - 4 }, line.label + " " + format(line.y));
      }
      for (const one of this.curves) {
        const dash = several && one.split === "train" && one.slot ? " dash" + Math.min(one.slot, 2) : "";
        const path = (points, ys) => points.map((point, k) => (k ? "L" : "M") + this.toX(point.x).toFixed(1) + " " + this.toY(ys ? ys[k] : point.y).toFixed(1)).join("");
        if (one.band) make(area, "path", { class: `curve raw ${color(one)}`, d: path(one.band) });
        if (!this.chart.dots) make(area, "path", { class: `curve ${one.split} ${color(one)}${dash}${one.smooth ? " raw" : ""}`, d: path(one.points) });
        if (one.smooth) make(area, "path", { class: `curve ${color(one)}${dash}`, d: path(one.points, one.smooth) });
        const dots = one.split === "eval" ? one.points.length < 80 : one.points.length < 2 || this.chart.dots;
        if (dots) for (const point of one.points) make(area, "circle", { class: color(one), cx: this.toX(point.x), cy: this.toY(point.y), r: one.split === "eval" ? 3.2 : 2.6 });
      }
    }

    hover(event) {
      const box = this.plot.getBoundingClientRect(), pixel = event.clientX - box.left;
      if (this.start !== undefined) {
        const low = Math.max(LEFT, Math.min(this.start, pixel)), high = Math.min(this.width - RIGHT, Math.max(this.start, pixel));
        this.box.setAttribute("x", low); this.box.setAttribute("width", Math.max(0, high - low)); this.box.setAttribute("visibility", "visible");
        return;
      }
      let best = null;
      for (const one of this.curves) for (const point of one.points) {
        const gap = Math.abs(this.toX(point.x) - pixel);
        if (point.x >= this.left && point.x <= this.right && (!best || gap < best.gap)) best = { gap, point, run: one.run };
      }
      if (!best) return this.leave();
      const at = this.toX(best.point.x);
      this.cross.setAttribute("x1", at); this.cross.setAttribute("x2", at); this.cross.setAttribute("visibility", "visible");
      this.fillTip(best, at);
      const wide = this.tip.offsetWidth;
      this.tip.style.left = (at + 14 + wide > this.width ? Math.max(0, at - 14 - wide) : at + 14) + "px";
      this.tip.style.top = "14px";
    }

    fillTip(best, at) {
      this.tip.hidden = false;
      this.tip.replaceChildren();
      const axes = data.runs[best.run].axes, step = best.point.step;
      const epoch = interpolate(axes.step, axes.epoch, step), hours = interpolate(axes.step, axes.hours, step);
      make(this.tip, "div", { class: "soft" }, `step ${Math.round(step)}, epoch ${format(epoch)}, ${hours < 1 ? format(hours * 60) + " min" : format(hours) + " h"}`);
      for (const one of this.curves) {
        let near = null;
        one.points.forEach((point, k) => { const gap = Math.abs(this.toX(point.x) - at); if (!near || gap < near.gap) near = { gap, point, k }; });
        if (!near || near.gap > 40) continue;
        const row = make(this.tip, "div");
        make(row, "span", { class: `swatch ${color(one)} ${one.split}` });
        const mean = one.smooth ? ` (smoothed ${format(one.smooth[near.k])})` : "";
        const where = near.point.step === step ? "" : ` at ${Math.round(near.point.step)}`;
        row.appendChild(document.createTextNode(`${this.nameOf(one)} ${format(near.point.y)}${mean}${where}`));
      }
      for (const mark of this.marks.filter((one) => Math.abs(one.at - at) < 5).slice(0, 4)) make(this.tip, "div", { class: "soft" }, `${mark.text} at ${mark.step}`);
    }

    leave() { this.tip.hidden = true; this.cross.setAttribute("visibility", "hidden"); this.start = undefined; this.box.setAttribute("visibility", "hidden"); }

    press(event) {
      if (event.pointerType !== "mouse" || event.button) return;
      event.preventDefault();
      this.start = event.clientX - this.plot.getBoundingClientRect().left;
    }

    release(event) {
      if (this.start === undefined) return;
      const end = event.clientX - this.plot.getBoundingClientRect().left;
      const [low, high] = [Math.min(this.start, end), Math.max(this.start, end)];
      const zoom = [Math.max(this.left, this.fromX(low)), Math.min(this.right, this.fromX(high))];
      this.start = undefined;
      this.box.setAttribute("visibility", "hidden");
      if (high - low > 8 && zoom[1] > zoom[0]) { state.zoom = zoom.map((x) => Number(x.toPrecision(7))); update(); }
    }
  }

  const views = data.charts.map((chart) => new View(chart, document.getElementById("charts")));
  const byId = (id) => document.getElementById(id);

  function update() {
    remember();
    byId("reset").hidden = !state.zoom;
    for (const button of document.querySelectorAll("[data-run]")) button.setAttribute("aria-pressed", String(!state.off["run" + button.dataset.run]));
    for (const view of views) view.draw();
  }

  byId("axis").value = state.x;
  byId("axis").onchange = (event) => { state.x = event.target.value; state.zoom = null; update(); };
  byId("smooth").value = state.smooth;
  byId("smooth").oninput = (event) => { state.smooth = Number(event.target.value); update(); };
  byId("trim").checked = state.trim;
  byId("trim").onchange = (event) => { state.trim = event.target.checked; update(); };
  byId("events").checked = state.events;
  byId("events").onchange = (event) => { state.events = event.target.checked; update(); };
  byId("reset").onclick = () => { state.zoom = null; update(); };
  for (const button of document.querySelectorAll("[data-run]")) button.onclick = () => { const key = "run" + button.dataset.run; state.off[key] = !state.off[key]; update(); };
  new ResizeObserver(() => { if (views.some((view) => view.plot.clientWidth !== view.width)) for (const view of views) view.draw(); }).observe(byId("charts"));
  update();

  const live = byId("live");
  if (live) {
    live.checked = state.live;
    live.onchange = () => { state.live = live.checked; remember(); };
    setInterval(() => { if (state.live && !document.hidden) location.reload(); }, 1000 * data.reload_seconds);
    const age = (Date.now() / 1000 - data.written) / 60;
    if (age > 5) byId("age").textContent = ` This page is ${Math.round(age)} minutes old: the run may have ended.`;
  }
  document.documentElement.dataset.ready = String(views.length);
})();
