"use strict";
// Draws the plots from the data in the page, and again when the colours or the width change.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const home = document.getElementById("plots");
  const HEIGHT = 220;
  const drawn = [];

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const short = (value) => (value == null ? "-" : value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(2));

  function axis(label, extra = {}) {
    return {
      label,
      labelSize: 18,
      labelGap: 0,
      labelFont: "12px system-ui, sans-serif",
      font: "12px system-ui, sans-serif",
      stroke: colour("quiet"),
      grid: { stroke: colour("line"), width: 1 },
      ticks: { stroke: colour("line"), width: 1 },
      ...extra,
    };
  }

  const xAxis = (label) => axis(label, { size: 30, space: 60 });
  const yAxis = (extra = {}) => axis(null, { size: 56, values: (_, values) => values.map((v) => (v == null ? "" : v.toLocaleString("en"))), ...extra });
  const COUNTS = [1, 2, 5, 10, 20, 50, 100, 200, 500].flatMap((step) => [step, step * 1e3, step * 1e6]).sort((a, b) => a - b);
  const line = (label, name) => ({ label, stroke: colour(name), width: 2, points: { show: false }, value: (_, v) => short(v) });
  const dots = (label, name) => ({
    label,
    stroke: colour(name),
    paths: () => null,
    points: { show: true, size: 5, fill: colour(name), width: 0 },
    value: (_, v) => short(v),
  });

  function plot(title, subtitle, columns, options) {
    const card = document.createElement("div");
    card.className = "plot";
    const heading = document.createElement("h2");
    heading.textContent = title;
    const text = document.createElement("p");
    text.textContent = subtitle;
    card.append(heading, text);
    home.append(card);
    const draw = () => {
      const made = options();
      const width = card.clientWidth - 24;
      made.axes ??= [xAxis("seconds"), yAxis()];
      made.series[0] = { label: made.axes[0].label, value: (_, v) => short(v) };
      return new uPlot({ width, height: HEIGHT, scales: { x: { time: false } }, cursor: { drag: { x: false } }, ...made }, columns, card);
    };
    drawn.push({ card, draw, chart: draw() });
  }

  function plotHistogram(name, shape) {
    const width = shape.edges[1] - shape.edges[0];
    const middles = shape.counts.map((_, place) => shape.edges[place] + width / 2);
    const beyond = shape.beyond ? `; ${shape.beyond.toLocaleString("en")} above ${short(shape.edges.at(-1))} ms` : "";
    plot(data.names[name], `How often, by milliseconds${beyond}`, [middles, shape.counts], () => ({
      axes: [xAxis("milliseconds"), yAxis({ incrs: COUNTS })],
      scales: { x: { time: false, range: [shape.edges[0], shape.edges.at(-1)] }, y: { range: (_, low, high) => [0, high * 1.05] } },
      series: [{}, { ...line("count", "one"), fill: colour("one"), width: 0, paths: uPlot.paths.bars({ size: [0.9, 100] }) }],
    }));
  }

  function plotRates() {
    const trials = [...data.trials].sort((a, b) => a.rate - b.rate);
    const columns = [trials.map((t) => t.rate), trials.map((t) => (t.passed ? t.share * 100 : null)), trials.map((t) => (t.passed ? null : t.share * 100))];
    plot("Rates that were tried", "Share of requests within the objectives, in percent", columns, () => ({
      axes: [xAxis("requests/s"), yAxis()],
      scales: { x: { time: false }, y: { range: [0, 105] } },
      series: [{}, dots("passed", "good"), dots("failed", "bad")],
    }));
  }

  function plotAll() {
    const { series, points } = data;
    if (data.trials.length) plotRates();
    for (const [name, shape] of Object.entries(data.histograms)) plotHistogram(name, shape);
    if (points.length) {
      const kinds = [
        [points.some((p) => p.is_good), () => dots("whole", "one"), (p) => (p.is_good ? p.e2el_ms : null)],
        [points.some((p) => p.is_good && p.ttft_ms != null), () => dots("first token", "two"), (p) => (p.is_good ? p.ttft_ms : null)],
        [points.some((p) => !p.is_good), () => dots("failed", "bad"), (p) => (p.is_good ? null : p.e2el_ms)],
      ].filter(([there]) => there);
      const columns = [points.map((p) => p.sent), ...kinds.map(([, , value]) => points.map(value))];
      plot("Requests", "Milliseconds of each, by when it was sent", columns, () => ({
        scales: { x: { time: false }, y: { range: (_, low, high) => [0, high * 1.05] } },
        series: [{}, ...kinds.map(([, make]) => make())],
      }));
    }
    if (series.times.length) {
      const zero = { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(high * 1.05, 0.1)] } };
      plot("Requests at once", "Over time", [series.times, series.running], () => ({ scales: zero, series: [{}, line("running", "one")] }));
      const answered = series.tokens.some((rate) => rate > 0);
      if (answered) plot("Output tokens", "A second, over time", [series.times, series.tokens], () => ({ scales: zero, series: [{}, line("tokens/s", "one")] }));
      const failed = series.failed.some((rate) => rate > 0);
      const ended = [series.times, series.finished, series.failed];
      plot("Requests that ended", "A second, over time", failed ? ended : ended.slice(0, 2), () => ({
        scales: zero,
        series: [{}, line("succeeded/s", "one"), ...(failed ? [line("failed/s", "bad")] : [])],
      }));
    }
  }

  plotAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const one of drawn) {
      one.chart.destroy();
      one.chart = one.draw();
    }
  });
  new ResizeObserver(() => {
    for (const { card, chart } of drawn) chart.setSize({ width: card.clientWidth - 24, height: HEIGHT });
  }).observe(home);
})();
