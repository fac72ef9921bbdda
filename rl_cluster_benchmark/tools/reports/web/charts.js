"use strict";
// Line charts as SVG: hover, toggles, redrawn when their width changes. No library, no network.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 250;
const EDGE = { left: 52, right: 12, top: 10, bottom: 38 };

function make(name, attributes, parent) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (parent) parent.append(node);
  return node;
}

function shortNumber(value) {
  const size = Math.abs(value);
  const trim = (number) => String(Number(number.toPrecision(4)));
  if (size >= 1e9) return trim(value / 1e9) + "G";
  if (size >= 1e6) return trim(value / 1e6) + "M";
  if (size >= 1e4) return trim(value / 1e3) + "k";
  return String(Number(value.toPrecision(size < 1 ? 2 : 4)));
}

function ticks(low, high, count) {
  const step = 10 ** Math.floor(Math.log10((high - low) / count));
  const nice = [1, 2, 5, 10].map((n) => n * step).find((n) => (high - low) / n <= count) || step;
  const found = [];
  for (let i = Math.ceil(low / nice - 1e-9); i * nice <= high + nice * 1e-9; i++) found.push(i * nice);
  return found;
}

function extent(values, withZero) {
  const finite = values.filter(Number.isFinite);
  let low = Math.min(...finite), high = Math.max(...finite);
  if (withZero) low = Math.min(low, 0);
  if (low === high) { low -= Math.abs(low) / 10 || 0.5; high += Math.abs(high) / 10 || 0.5; }
  const spare = (high - low) * 0.05;
  return [withZero && low === 0 ? 0 : low - spare, high + spare];
}

// series: {name, color, x, y, low, high, early, dashed}; options: {xLabel, yLabel, fromZero}
class LineChart {
  constructor(place, options) {
    this.place = place;
    this.options = options;
    this.series = [];
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.width = 0;
    new ResizeObserver(() => {
      const width = Math.round(place.clientWidth);
      if (width > 0 && width !== this.width) this.draw();
    }).observe(place);
  }

  show(series, options) {
    this.series = series.filter((line) => line.x.length > 0);
    Object.assign(this.options, options || {});
    this.draw();
  }

  draw() {
    this.width = Math.round(this.place.clientWidth) || 520;
    const svg = make("svg", { viewBox: `0 0 ${this.width} ${HEIGHT}`, role: "img", "aria-label": this.options.label || "" });
    this.place.replaceChildren(svg, this.tip);
    this.tip.hidden = true;
    if (!this.series.length) {
      const text = make("text", { x: this.width / 2, y: HEIGHT / 2, "text-anchor": "middle", class: "empty" }, svg);
      text.textContent = this.options.empty || "nothing to show";
      return;
    }
    const xs = this.series.flatMap((line) => line.x);
    const band = (line) => [...(line.low || []).slice(line.early || 0), ...(line.high || []).slice(line.early || 0)];
    const ys = this.series.flatMap((line) => [...line.y, ...band(line)]);
    const [x0, x1] = [0, Math.max(...xs) || 1];
    const [y0, y1] = extent(ys, this.options.fromZero);
    const toX = (x) => EDGE.left + ((x - x0) / (x1 - x0)) * (this.width - EDGE.left - EDGE.right);
    const toY = (y) => HEIGHT - EDGE.bottom - ((y - y0) / (y1 - y0)) * (HEIGHT - EDGE.top - EDGE.bottom);
    this.axes(svg, x0, x1, y0, y1, toX, toY);
    for (const line of this.series) this.line(svg, line, toX, toY);
    this.hover(svg, toX, toY, x1);
  }

  axes(svg, x0, x1, y0, y1, toX, toY) {
    for (const y of ticks(y0, y1, 5)) {
      make("line", { x1: EDGE.left, x2: this.width - EDGE.right, y1: toY(y), y2: toY(y), class: "grid" }, svg);
      make("text", { x: EDGE.left - 6, y: toY(y) + 4, "text-anchor": "end" }, svg).textContent = shortNumber(y);
    }
    for (const x of ticks(x0, x1, Math.max(2, Math.floor(this.width / 90)))) {
      make("text", { x: toX(x), y: HEIGHT - EDGE.bottom + 16, "text-anchor": "middle" }, svg).textContent = shortNumber(x);
    }
    const bottom = HEIGHT - EDGE.bottom;
    make("line", { x1: EDGE.left, x2: this.width - EDGE.right, y1: bottom, y2: bottom, class: "axis" }, svg);
    const label = make("text", { x: this.width - EDGE.right, y: HEIGHT - 6, "text-anchor": "end" }, svg);
    label.textContent = this.options.xLabel || "";
  }

  line(svg, line, toX, toY) {
    const points = line.x.map((x, i) => [toX(x), toY(line.y[i])]);
    const path = (part) => part.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    const early = line.early || 0; // points before 100 episodes have ended
    if (line.low && line.x.length > early + 1) {
      const edge = (values) => line.x.map((x, i) => [toX(x), toY(values[i])]).slice(early);
      const band = path(edge(line.high)) + path(edge(line.low).reverse()).replace("M", "L") + "Z";
      make("path", { d: band, fill: line.color, "fill-opacity": 0.15, stroke: "none" }, svg);
    }
    const stroke = { fill: "none", stroke: line.color, "stroke-width": 1.8, "stroke-linejoin": "round" };
    if (early) {
      make("path", { ...stroke, d: path(points.slice(0, early + 1)), "stroke-dasharray": "1.5 4", opacity: 0.75 }, svg);
    }
    const solid = { ...stroke, d: path(points.slice(early)), "data-series": line.name };
    if (line.dashed) solid["stroke-dasharray"] = "6 4";
    make("path", solid, svg);
    const dots = line.dashed ? points : points.length === 1 || points.length - early === 1 ? points.slice(-1) : [];
    for (const [x, y] of dots) make("circle", { cx: x, cy: y, r: 3, fill: line.color }, svg);
  }

  hover(svg, toX, toY, x1) {
    const cursor = make("line", { y1: EDGE.top, y2: HEIGHT - EDGE.bottom, class: "cursor", visibility: "hidden" }, svg);
    const dots = this.series.map((line) => make("circle", { r: 3.5, fill: line.color, visibility: "hidden" }, svg));
    const leave = () => {
      this.tip.hidden = true;
      for (const node of [cursor, ...dots]) node.setAttribute("visibility", "hidden");
    };
    const move = (event) => {
      const box = svg.getBoundingClientRect();
      const inside = ((event.clientX - box.left) / box.width) * this.width;
      const x = ((inside - EDGE.left) / (this.width - EDGE.left - EDGE.right)) * x1;
      if (x < 0 || x > x1) return leave();
      this.tip.replaceChildren();
      const title = document.createElement("div");
      this.series.forEach((line, index) => {
        let nearest = 0;
        for (let i = 1; i < line.x.length; i++) {
          if (Math.abs(line.x[i] - x) < Math.abs(line.x[nearest] - x)) nearest = i;
        }
        const row = document.createElement("div");
        const swatch = document.createElement("span");
        swatch.className = "swatch";
        swatch.style.setProperty("--color", line.color);
        const range = line.low && line.seeds > 1 ? ` (${shortNumber(line.low[nearest])} to ${shortNumber(line.high[nearest])})` : "";
        row.append(swatch, `${line.name}: ${shortNumber(line.y[nearest])}${range}`);
        this.tip.append(row);
        dots[index].setAttribute("cx", toX(line.x[nearest]));
        dots[index].setAttribute("cy", toY(line.y[nearest]));
        dots[index].setAttribute("visibility", "visible");
      });
      title.textContent = `${shortNumber(x)} ${this.options.xLabel || ""}`;
      this.tip.prepend(title);
      cursor.setAttribute("x1", inside);
      cursor.setAttribute("x2", inside);
      cursor.setAttribute("visibility", "visible");
      this.tip.hidden = false;
      const left = ((event.clientX - box.left) / box.width) * box.width;
      const room = box.width - this.tip.offsetWidth;
      this.tip.style.left = `${Math.max(0, Math.min(room, left < box.width / 2 ? left + 14 : left - this.tip.offsetWidth - 14))}px`;
      this.tip.style.top = "8px";
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", leave);
  }
}

const X_LABELS = { step: "environment steps", time: "minutes" };
const colorOf = (index) => `var(--c${index % 8})`;
