"use strict";
// The curves of the report: which runs are shown, over which axis, of which game.

const data = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set();
let axis = "step";

const charts = [...document.querySelectorAll(".chart[data-task]")].map((place) => {
  const { task, panel } = place.dataset;
  const { title, fromZero, empty } = data.panels[panel];
  const label = `${title}, ${data.tasks[task].name}`;
  return { task, panel, chart: new LineChart(place, { label, fromZero, empty }) };
});

const profilePlace = document.getElementById("profile");
const profile = profilePlace && new LineChart(profilePlace, { label: "Performance profile", fromZero: true, xLabel: "normalised score" });

function seriesOf(task, panel) {
  const lines = [];
  data.tasks[task].groups.forEach((group) => {
    const curve = group.curves[panel] && group.curves[panel][axis];
    if (!curve || hidden.has(group.variant)) return;
    const color = colorOf(data.variants.indexOf(group.variant));
    lines.push({ name: group.variant, color, seeds: group.seeds, ...curve });
  });
  const published = data.tasks[task].published;
  if (panel === "reward" && axis === "step" && published.x.length && !hidden.has(data.reference)) {
    lines.push({ name: data.reference, color: "var(--reference)", dashed: true, ...published });
  }
  return lines;
}

function drawAll() {
  for (const { task, panel, chart } of charts) {
    const xLabel = X_LABELS[panel === "progress" ? "time" : axis];
    chart.show(seriesOf(task, panel), { xLabel });
  }
  if (profile) {
    const shown = data.profiles.filter((line) => !hidden.has(line.variant));
    profile.show(shown.map((line) => ({ name: line.variant, color: colorOf(data.variants.indexOf(line.variant)), seeds: 2, ...line })));
  }
}

for (const button of document.querySelectorAll("[data-variant]")) {
  button.addEventListener("click", () => {
    const name = button.dataset.variant;
    const shown = hidden.delete(name);
    if (!shown) hidden.add(name);
    button.setAttribute("aria-pressed", String(shown));
    drawAll();
  });
}
for (const button of document.querySelectorAll("[data-axis]")) {
  button.addEventListener("click", () => {
    axis = button.dataset.axis;
    for (const other of document.querySelectorAll("[data-axis]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    drawAll();
  });
}
const chooser = document.getElementById("task");
if (chooser) {
  chooser.addEventListener("change", () => {
    for (const block of document.querySelectorAll(".task")) block.hidden = block.dataset.task !== chooser.value;
    drawAll();
  });
}
drawAll();
