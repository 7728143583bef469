"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const plots = new Map(figures.map((figure) => [figure.id, document.getElementById(figure.id)]));
  const timePlots = figures.filter((figure) => figure.time).map((figure) => plots.get(figure.id));
  const config = {
    responsive: true,
    displaylogo: false,
    showTips: false,
    doubleClick: "reset",
    displayModeBar: false,
  };

  // plotly.js is in the page, gzipped: as a script of its own it runs as if it were loaded.
  const load = async () => {
    const packed = atob(document.getElementById("plotly").textContent);
    const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  };

  const apologise = (error) => {
    for (const plot of plots.values()) {
      plot.textContent = "The charts need a browser of 2023 or later.";
    }
    throw error;
  };

  // Colours and fonts are written as var(--name), so that the style sheet alone decides them.
  const painted = (value, style) => {
    if (typeof value === "string") {
      return value.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
    }
    if (value === null || typeof value !== "object") return value;
    if (typeof value[0] === "number" && typeof value[1] !== "string") return value;
    if (Array.isArray(value)) return value.map((inner) => painted(inner, style));
    const entries = Object.entries(value).map(([key, inner]) => [key, painted(inner, style)]);
    return Object.fromEntries(entries);
  };

  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    return Promise.all(
      figures.map((figure) =>
        Plotly.react(
          plots.get(figure.id),
          painted(figure.data, style),
          painted(figure.layout, style),
          config,
        ),
      ),
    ).then(() => document.dispatchEvent(new Event("drawn")));
  };

  // A zoom of one time chart, by whatever gesture, is a zoom of all.
  const follow = (source) => {
    const [from, to] = source.layout.xaxis.range;
    for (const plot of timePlots) {
      const range = plot.layout.xaxis.range;
      if (range[0] !== from || range[1] !== to) {
        Plotly.relayout(plot, { "xaxis.range": [from, to] });
      }
    }
  };

  // One crosshair: what is read in one time chart is read in all that can be seen.
  const crosses = timePlots.filter((plot) => plot.id !== "block-owners");
  const seen = (plot) => {
    const { top, bottom } = plot.getBoundingClientRect();
    return bottom > 0 && top < innerHeight;
  };
  let leader = null;
  const cross = (source, event) => {
    if (leader !== null && leader !== source) return;
    leader = source;
    for (const plot of crosses) {
      if (plot === source) continue;
      if (event && seen(plot)) Plotly.Fx.hover(plot, { xval: event.xvals[0] }, ["xy"]);
      else if (!event) Plotly.Fx.unhover(plot);
    }
    leader = null;
  };

  // A click beside a dot that stands for a request opens its story.
  const NEAR_PX = 12;
  const openRequest = (plot, { clientX, clientY }) => {
    const { xaxis, yaxis } = plot._fullLayout;
    const { left, top } = plot.getBoundingClientRect();
    let [nearest, found] = [NEAR_PX, null];
    for (const { x, y, customdata } of plot.data) {
      for (const [i, request] of (customdata ?? []).entries()) {
        const across = xaxis._offset + xaxis.d2p(x[i]) + left - clientX;
        const up = yaxis._offset + yaxis.d2p(y[i]) + top - clientY;
        const far = Math.hypot(across, up);
        if (far < nearest) [nearest, found] = [far, request];
      }
    }
    if (found !== null) document.dispatchEvent(new CustomEvent("request", { detail: found }));
  };

  const save = ({ figure }) =>
    Plotly.downloadImage(plots.get(figure), { format: "svg", filename: figure });

  const toggle = (button) => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    const traces = button.dataset.traces.split(",").map(Number);
    Plotly.restyle(plots.get(button.dataset.figure), { visible: shown }, traces);
  };

  // Points of one owner, in every figure that can show them: what is under the pointer.
  const marked = figures.filter((figure) => figure.data.at(-1)?.meta === "highlight");
  const mark = (owner) => {
    for (const figure of marked) {
      const place = { x: [], y: [] };
      for (const trace of figure.data.slice(0, -1)) {
        (trace.customdata ?? []).forEach((other, i) => {
          if (other !== owner || trace.x[i] === null) return;
          place.x.push(trace.x[i]);
          place.y.push(trace.y[i]);
        });
      }
      Plotly.restyle(plots.get(figure.id), { x: [place.x], y: [place.y] }, [figure.data.length - 1]);
    }
  };

  const start = async () => {
    await load().catch(apologise);
    await draw();
    for (const { id } of marked) {
      plots.get(id).on("plotly_hover", ({ points }) => mark(points[0].customdata));
    }
    for (const plot of timePlots) plot.on("plotly_relayout", () => follow(plot));
    for (const plot of crosses) {
      plot.on("plotly_hover", (event) => cross(plot, event));
      plot.on("plotly_unhover", () => cross(plot, null));
    }
    const dotted = document.getElementById("ttft");
    dotted?.addEventListener("click", (event) => openRequest(dotted, event), true);
    for (const button of document.querySelectorAll("figcaption button")) {
      button.addEventListener("click", () => save(button.dataset));
    }
    for (const button of document.querySelectorAll(".legend button")) {
      button.addEventListener("click", () => toggle(button));
    }
    document.documentElement.dataset.drawn = "true";
    for (const media of ["(prefers-color-scheme: dark)", "print"]) {
      matchMedia(media).addEventListener("change", draw);
    }
  };
  start();
})();
