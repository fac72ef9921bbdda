"use strict";
// Asks for news every two seconds; everything shown is text, never markup.

const EVERY = 2000;
const SHOWN_AT_FIRST = 4;
const find = (id) => document.getElementById(id);
let axis = "step";
let shown = null; // names of the runs whose curves are drawn
let colors = new Map();
const curves = new Map();

const charts = [...document.querySelectorAll(".chart")].map((place) => ({
  panel: place.dataset.panel,
  chart: new LineChart(place, { fromZero: ["speed", "memory"].includes(place.dataset.panel), empty: "nothing yet" }),
}));

function element(name, text, className) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}
const whole = (value) => (value === undefined || value === null ? "-" : Math.round(value).toLocaleString("en"));
const decimal = (value) => (value === undefined || value === null ? "-" : value.toFixed(2));
function duration(seconds) {
  if (seconds === undefined || seconds === null) return "-";
  const s = Math.round(seconds);
  if (s >= 3600) return `${Math.floor(s / 3600)}h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")}m`;
  return s >= 60 ? `${Math.floor(s / 60)}m ${String(s % 60).padStart(2, "0")}s` : `${s}s`;
}
function bar(fraction, className) {
  const track = element("span", undefined, className ? `track ${className}` : "track");
  const fill = element("i");
  fill.style.width = `${100 * fraction}%`;
  track.append(fill);
  return track;
}
function swatch(color) {
  const node = element("span", undefined, "swatch");
  node.style.setProperty("--color", color);
  return node;
}

function showMachine({ cores, memory_used_gb, memory_gb }) {
  const cells = cores.map((percent, number) => {
    const cell = element("div", `core ${number}: ${Math.round(percent)}%`);
    cell.append(bar(percent / 100));
    return cell;
  });
  const memory = element("div", `memory: ${memory_used_gb.toFixed(1)} of ${memory_gb.toFixed(0)} GB`);
  memory.append(bar(memory_used_gb / memory_gb));
  find("cores").replaceChildren(...cells, memory);
}

function showRuns(runs) {
  find("runs").replaceChildren(...runs.map((run) => {
    const row = element("tr");
    const name = element("td");
    const button = element("button");
    button.type = "button";
    button.dataset.run = run.name;
    button.setAttribute("aria-pressed", String(shown.has(run.name)));
    button.append(swatch(colors.get(run.name)), run.name);
    if (run.algorithm) button.title = `${run.algorithm} ${run.mode}, ${run.game}, seed ${run.seed}`;
    button.addEventListener("click", () => {
      if (!shown.delete(run.name)) shown.add(run.name);
      button.setAttribute("aria-pressed", String(shown.has(run.name)));
      refreshCurves(runs);
    });
    name.append(button);
    const words = [run.reason ? `${run.state}: ${run.reason}` : run.state, ...(run.notes || [])].join("; ");
    const state = element("td", words, `wrap state-${run.state}`);
    const done = element("td");
    if (run.fraction !== undefined) done.append(bar(run.fraction, "done"));
    row.append(name, state, done);
    for (const text of [whole(run.steps), whole(run.fps), decimal(run.reward), duration(run.seconds), duration(run.seconds_left), decimal(run.memory_gb)]) {
      row.append(element("td", text, "figure"));
    }
    return row;
  }));
}

function showPhases(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.phases || {})))];
  find("phases").replaceChildren(...runs.filter((run) => shown.has(run.name) && run.phases).flatMap((run) => {
    const track = element("span", undefined, "track");
    names.forEach((name, index) => {
      const part = element("i");
      part.style.width = `${100 * Math.max(0, run.phases[name] || 0)}%`;
      part.style.background = colorOf(index);
      track.append(part);
    });
    const largest = Object.entries(run.phases).sort((a, b) => b[1] - a[1]).slice(0, 2);
    const text = largest.map(([name, share]) => `${name} ${Math.round(100 * share)}%`).join(", ");
    return [element("span", run.name, "name"), track, element("span", text)];
  }));
  find("phase-names").replaceChildren(...names.flatMap((name, index) => [swatch(colorOf(index)), `${name}  `]));
}

function showProcesses(runs) {
  find("processes").replaceChildren(...runs.flatMap((run) => (run.processes || []).map((process) => {
    const row = element("tr");
    row.append(element("td", run.name), element("td", process.role));
    for (const text of [String(process.pid), `${Math.round(process.cpu)}%`, String(process.core), decimal(process.memory_gb)]) {
      row.append(element("td", text, "figure"));
    }
    return row;
  })));
}

function drawCurves() {
  for (const { panel, chart } of charts) {
    const lines = [...shown].filter((name) => curves.get(name) && curves.get(name)[panel]).map((name) => {
      const line = curves.get(name)[panel];
      return { name, color: colors.get(name), x: line[axis], y: line.y, early: line.early };
    });
    chart.show(lines, { xLabel: X_LABELS[axis] });
  }
}

async function refreshCurves(runs) {
  const wanted = runs.filter((run) => shown.has(run.name) && run.steps !== undefined);
  await Promise.all(wanted.map(async (run) => {
    const known = curves.get(run.name);
    if (known && known.steps === run.steps) return;
    const answer = await fetch(`/series?run=${encodeURIComponent(run.name)}`);
    if (answer.ok) curves.set(run.name, { steps: run.steps, ...(await answer.json()) });
  }));
  drawCurves();
}

async function refresh() {
  try {
    const news = await (await fetch("/data")).json();
    const names = news.runs.map((run) => run.name).sort();
    colors = new Map(names.map((name, index) => [name, colorOf(index)]));
    if (shown === null && news.runs.length) {
      const running = news.runs.filter((run) => run.state === "running");
      shown = new Set((running.length ? running : news.runs).slice(0, SHOWN_AT_FIRST).map((run) => run.name));
    }
    find("where").textContent = `${news.directory}, ${news.runs.length} ${news.runs.length === 1 ? "run" : "runs"}, ${news.time}`;
    find("hidden").textContent = news.hidden ? `${news.hidden} older runs are not shown.` : "";
    showMachine(news.machine);
    if (shown !== null) {
      showRuns(news.runs);
      showPhases(news.runs);
      showProcesses(news.runs);
      await refreshCurves(news.runs);
    }
    find("content").classList.remove("stale");
  } catch (error) {
    find("where").textContent = "The dashboard does not answer; what is shown is old.";
    find("content").classList.add("stale");
  }
  setTimeout(refresh, EVERY);
}

for (const button of document.querySelectorAll("[data-axis]")) {
  button.addEventListener("click", () => {
    axis = button.dataset.axis;
    for (const other of document.querySelectorAll("[data-axis]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    drawCurves();
  });
}
refresh();
